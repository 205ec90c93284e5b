"""Whatever a command refuses, it says so in one line that names the option."""

import shutil
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
from typer.testing import CliRunner

from distlion_lab.cli import app

PLAN = "plan --params 1e9 --nodes 4 --link 10gbit --compute-s 1"
REFUSED = [
    ("plan", "--params"),
    ("plan --params 1e9 --nodes x", "--nodes"),
    ("plan --nods 3", "--nods"),
    ("plan --params 1,3B --nodes 4 --link 10gbit --compute-s 1", "--params"),
    ("plan --params 1e9 --nodes 4 --link 10gbit --compute-s 0,8", "--compute-s"),
    ("plan --params 1e9 --nodes 1_0 --link 10gbit --compute-s 1", "--nodes"),
    (f"{PLAN} --threshold nan", "--threshold"),
    (f"{PLAN} --price-per-gb 1e400", "--price-per-gb"),
    (f"{PLAN} --price-per-gpu-hour 1_0", "--price-per-gpu-hour"),
    ("compare --workers 4,1e400", "--workers"),
    ("compare --lr-factor inf", "--lr-factor"),
    (f"{PLAN} --device tpu", "--device"),
    (f"{PLAN} --gpus-per-node 0", "--gpus-per-node"),
    (f"{PLAN} --latency-us -1", "--latency-us"),
    (f"{PLAN} --message-us -1", "--message-us"),
    (f"{PLAN} --link fast", "--link"),
    (f"{PLAN} --node-link fast", "--node-link"),
    (f"{PLAN} --overlap-share 2", "--overlap-share"),
    (f"{PLAN} --momentum-sync-every 0", "--momentum-sync-every"),
    (f"{PLAN} --momentum-sync-bits 5", "--momentum-sync-bits"),
    (f"{PLAN} --threshold -1", "--threshold"),
    (f"{PLAN} --price-per-gpu-hour -1", "--price-per-gpu-hour"),
    (f"{PLAN} --price-per-gb -1", "--price-per-gb"),
    ("doctor --threads 0", "--threads"),
    ("doctor --workers 0", "--workers"),
    ("doctor --params many", "--params"),
    ("train --task music", "--task"),
    ("train --rule loudest", "--rule"),
    ("train --exchange pigeon", "--exchange"),
    ("train --steps 0", "--steps"),
    ("train --workers 0", "--workers"),
    ("train --lr 0", "--lr"),
    ("train --batch-size 0", "--batch-size"),
    ("train --eval-every 0", "--eval-every"),
    ("train --momentum-sync-every 0", "--momentum-sync-every"),
    ("train --diagnose-every 0", "--diagnose-every"),
    ("train --on-disagreement exclude", "--on-disagreement"),
    ("train --warmup-steps -1", "--warmup-steps"),
    ("train --weight-decay -1", "--weight-decay"),
    ("train --step-timeout 0", "--step-timeout"),
    ("train --checkpoint-every 0", "--checkpoint-every"),
    ("train --checkpoint-every 5 --keep-checkpoints 0", "--keep-checkpoints"),
    ("train --task images --tokenizer byte", "--tokenizer"),
    ("train --task text --partition by-class", "--partition"),
    ("train --alpha 1", "--alpha"),
    ("train --rule ddp-fp16 --overlap on", "--overlap"),
    ("train --rule ddp-fp16 --exchange all-reduce", "--exchange"),
    ("train --rule ddp-fp16 --checkpoint-every 5", "--checkpoint-every"),
    ("train --resume", "--resume"),
    ("compare --methods loudest", "--methods"),
    ("compare --workers four", "--workers"),
    ("compare --workers 0", "--workers"),
    ("compare --seeds 0", "--seeds"),
    ("compare --lrs 0", "--lrs"),
    ("compare --lr-factor 1", "--lr-factor"),
    ("compare --lr-scale 0", "--lr-scale"),
    ("compare --steps 0", "--steps"),
    ("compare --tuning-steps 0", "--tuning-steps"),
    ("compare --device moon", "--device"),
    ("compare --link fast", "--link"),
    ("compare --latency-us -1", "--latency-us"),
    ("compare --jobs 0", "--jobs"),
    ("trian", "train"),
]


@pytest.mark.parametrize(("words", "named"), REFUSED)
def test_refusal_is_one_line_with_the_name_of_the_option(words, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 2, result.exception
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("distlion: ")
    assert named in line
    # The name that the library has for it would send readers to the source.
    assert f" {named.strip('-').replace('-', '_')} is " not in line


@pytest.mark.parametrize("columns", [30, 60, 80, 200])
@pytest.mark.parametrize("command", ["", "plan", "train", "compare", "doctor"])
def test_help_has_every_option_whole_at_any_width(command, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert shutil.get_terminal_size().columns == columns
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    found = app_command(command.split())
    for param in found.params:
        if param.param_type_name == "option":
            assert param.opts[0] in result.stdout.split()


def app_command(words):
    import typer

    found = typer.main.get_command(app)
    for word in words:
        found = found.commands[word]
    return found


def test_every_number_of_every_command_is_read_by_the_one_format():
    """typer's own reading takes 1_0 for 10, and nan and inf for numbers."""
    commands = list(walk(app))
    assert len(commands) == 4
    options = [
        (function.__name__, name, kind)
        for function in commands
        for name, kind in get_type_hints(function, include_extras=True).items()
    ]
    numbers = [
        (command, name, get_args(kind)[1])
        for command, name, kind in options
        if get_origin(kind) is Annotated
        and {int, float} & {get_args(kind)[0], *get_args(get_args(kind)[0])}
    ]
    assert len(numbers) > 30
    assert [(command, name) for command, name, option in numbers if option.parser is None] == []


def walk(group):
    for command in group.registered_commands:
        yield command.callback
    for below in group.registered_groups:
        yield from walk(below.typer_instance)


def is_number(kind):
    return not {int, float}.isdisjoint({kind, *get_args(kind)})
