// The only file that knows Python: it reads segments and tensors, checks them once, and calls the core
// without the GIL. src/distlion/kernels/cpu.py wraps it in the contract.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cfloat>
#include <string>
#include <vector>

#include "core.hpp"
#include "coin.hpp"

namespace nb = nanobind;

namespace {

using namespace distlion;

[[noreturn]] void refuse(const std::string& message) {
    const nb::object error = nb::module_::import_("distlion.errors").attr("InvalidArgumentError");
    PyErr_SetString(error.ptr(), message.c_str());
    throw nb::python_error();
}

std::string to_string(nb::handle object) { return nb::str(object).c_str(); }

// What the core needs to know of a tensor.
struct TensorView {
    void* data;
    nb::dlpack::dtype dtype;
    std::vector<std::int64_t> shape;
    std::size_t n_elements;
    std::int64_t row_stride = 0;  // of rows: elements from one to the next
};

// What is read besides address, dtype and number of elements. Tensors are contiguous, but for rows: of
// two dimensions, each row contiguous.
enum class Wants { nothing_else, shape, rows };

// `what` and `whose`, which may be missing, say in an error which tensor it is.
std::string describe(const char* what, nb::handle whose) {
    return std::string(what) + (whose.is_valid() ? " of " + to_string(whose) : "");
}

constexpr auto kInt = static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int);
constexpr auto kUInt = static_cast<std::uint8_t>(nb::dlpack::dtype_code::UInt);
constexpr auto kFloat = static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float);
constexpr auto kBfloat = static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat);
constexpr std::uint8_t kOther = 0xFF;
constexpr auto kBool = static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bool);

bool is_type(nb::dlpack::dtype dtype, std::uint8_t code, int bits) {
    return dtype.code == code && dtype.bits == bits && dtype.lanes == 1;
}

// The part of DLPack 1.3's exchange table that is used; torch has it since 2.10.
struct ExchangeApi {
    struct {
        std::uint32_t major, minor;
    } version;
    void* previous;
    void* allocate;
    void* managed_from_object;
    void* managed_to_object;
    int (*tensor_from_object)(void* object, nb::dlpack::dltensor* out);
};

// Reads tensors by the exchange table, a dozen nanoseconds each, or by their Python attributes.
class TensorReader {
public:
    explicit TensorReader(nb::object exchange_api) {
        if (exchange_api.is_none()) {
            return;
        }
        auto* api = static_cast<const ExchangeApi*>(
            PyCapsule_GetPointer(exchange_api.ptr(), "dlpack_exchange_api"));
        if (!api) {
            throw nb::python_error();
        }
        if (api->version.major == 1) {
            api_ = api;
        }
    }

    TensorView read(nb::handle object, const char* what, nb::handle whose,
                    Wants wants = Wants::nothing_else) const {
        const TensorView view = api_ && api_->tensor_from_object
                                    ? read_by_table(object, what, whose, wants)
                                    : read_by_attributes(object, what, whose, wants);
        if (!view.data && view.n_elements > 0) {
            refuse(describe(what, whose) + ": given a tensor without memory of its own, such as a wrapper of "
                   "other tensors; expected a plain one");
        }
        return view;
    }

private:
    TensorView read_by_table(nb::handle object, const char* what, nb::handle whose, Wants wants) const {
        nb::dlpack::dltensor tensor;
        if (api_->tensor_from_object(object.ptr(), &tensor) != 0) {
            throw nb::python_error();
        }
        TensorView view{static_cast<std::uint8_t*>(tensor.data) + tensor.byte_offset, tensor.dtype, {}, 1};
        const int first_dim = wants == Wants::rows ? 1 : 0;
        check_dims(tensor.ndim, wants, what);
        std::int64_t stride = 1;
        bool is_contiguous = true;
        for (int dim = tensor.ndim; dim-- > 0;) {
            view.n_elements *= static_cast<std::size_t>(tensor.shape[dim]);
            is_contiguous &= dim < first_dim || !tensor.strides || tensor.shape[dim] == 1 ||
                             tensor.strides[dim] == stride;
            stride *= tensor.shape[dim];
        }
        if (wants != Wants::nothing_else) {
            view.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
        }
        if (wants == Wants::rows) {
            view.row_stride = tensor.strides ? tensor.strides[0] : tensor.shape[1];
        }
        check(tensor.device.device_type == nb::device::cpu::value,
              is_contiguous || view.n_elements == 0, what, whose);
        return view;
    }

    TensorView read_by_attributes(nb::handle object, const char* what, nb::handle whose,
                                  Wants wants) const {
        const std::string device = nb::cast<std::string>(object.attr("device").attr("type"));
        check_dims(nb::cast<int>(object.attr("dim")()), wants, what);
        // Of rows the first says enough; there may be none.
        const nb::object whole = wants == Wants::rows ? object[nb::slice(1)] : nb::borrow(object);
        check(device == "cpu", nb::cast<bool>(whole.attr("is_contiguous")()), what, whose);
        TensorView view{reinterpret_cast<void*>(nb::cast<std::uintptr_t>(object.attr("data_ptr")())),
                        read_dtype(object),
                        {},
                        nb::cast<std::size_t>(object.attr("numel")())};
        if (wants != Wants::nothing_else) {
            for (nb::handle size : object.attr("shape")) {
                view.shape.push_back(nb::cast<std::int64_t>(size));
            }
        }
        if (wants == Wants::rows) {
            view.row_stride = nb::cast<std::int64_t>(object.attr("stride")(0));
        }
        return view;
    }

    static nb::dlpack::dtype read_dtype(nb::handle object) {
        const std::string name = to_string(object.attr("dtype"));
        if (name == "torch.float32") return {kFloat, 32, 1};
        if (name == "torch.bfloat16") return {kBfloat, 16, 1};
        if (name == "torch.float16") return {kFloat, 16, 1};
        if (name == "torch.float64") return {kFloat, 64, 1};
        if (name == "torch.int64") return {kInt, 64, 1};
        if (name == "torch.bool") return {kBool, 8, 1};
        if (name == "torch.uint8") return {kUInt, 8, 1};
        // Of others the size is enough.
        return {kOther, static_cast<std::uint8_t>(8 * nb::cast<int>(object.attr("element_size")())), 1};
    }

    static void check_dims(int n_dims, Wants wants, const char* what) {
        if (wants == Wants::rows && n_dims != 2) {
            refuse(std::string(what) + ": given a tensor of " + std::to_string(n_dims) +
                   " dimensions, expected rows: 2");
        }
    }

    static void check(bool is_on_cpu, bool is_contiguous, const char* what, nb::handle whose) {
        if (is_on_cpu && is_contiguous) {
            return;
        }
        refuse(describe(what, whose) + ": given a tensor that is " + (is_on_cpu ? "not contiguous" : "not on the CPU") +
               ", expected a contiguous one on the CPU");
    }

    const ExchangeApi* api_ = nullptr;
};

// Named tuples are read by position, which costs next to nothing.
nb::handle item(nb::handle tuple, Py_ssize_t position) {
    PyObject* value = PyTuple_GetItem(tuple.ptr(), position);
    if (!value) {
        throw nb::python_error();
    }
    return value;
}

double read_double(nb::handle value) {
    const double number = PyFloat_AsDouble(value.ptr());
    if (number == -1.0 && PyErr_Occurred()) {
        throw nb::python_error();
    }
    return number;
}

// Of elements, words and blocks; sums of two do not overflow.
constexpr std::size_t kMostCounted = std::size_t{1} << 56;

std::size_t read_size(nb::handle value) {
    const std::size_t number = PyLong_AsSize_t(value.ptr());
    if (number == SIZE_MAX && PyErr_Occurred()) {
        throw nb::python_error();
    }
    if (number > kMostCounted) {
        refuse("a slot of " + std::to_string(number) + " elements or words: expected at most 2^56");
    }
    return number;
}

std::uint64_t read_unsigned(nb::handle value) {
    const std::uint64_t number = PyLong_AsUnsignedLongLong(value.ptr());
    if (number == ~std::uint64_t{0} && PyErr_Occurred()) {
        throw nb::python_error();
    }
    return number;
}

unsigned read_bit(nb::handle value) {
    const std::uint64_t bit = read_unsigned(value);
    if (bit >= kWordElements) {
        refuse("a slot that starts at bit " + std::to_string(bit) + " of a word: expected 0 to 63");
    }
    return static_cast<unsigned>(bit);
}

// Positions in the named tuples of distlion.layout and distlion.kernels.contract.
namespace slot_field {
enum { name, n_elements, first_word, bucket_word, first_bit };
}
namespace segment_field {
enum { slot, param, grad, exp_avg, coefficients };
}
namespace coefficient_field {
enum { beta1, beta2, lr, weight_decay, grad_scale };
}

DType read_float_type(nb::dlpack::dtype dtype, const char* what, nb::handle whose, bool may_be_half) {
    if (is_type(dtype, kFloat, 32)) return DType::float32;
    if (is_type(dtype, kBfloat, 16)) return DType::bfloat16;
    if (may_be_half && is_type(dtype, kFloat, 16)) return DType::float16;
    refuse(describe(what, whose) +
           ": a dtype that is not supported; expected float32, bfloat16" +
           (may_be_half ? " or float16" : " (float16 momenta are kept in float32)"));
}

// The segments of a bucket, read and checked once for several ops. Addresses stay good as long as the
// tensors do, which the Python object that owns the table keeps alive.
struct SegmentTable {
    std::vector<Segment> segments;
    std::vector<double> lr;
    std::size_t end_word = 0;  // of the last one
    bool is_ordered = true;    // each begins behind the one before it
};

class SegmentReader {
public:
    explicit SegmentReader(const TensorReader& tensors) : tensors_(tensors) {}

    void read_into(SegmentTable& table, nb::handle segment) const {
        const nb::handle slot = item(segment, segment_field::slot);
        const nb::handle name = item(slot, slot_field::name);
        Segment read{};
        read.n_elements = read_size(item(slot, slot_field::n_elements));
        read.first_word = read_unsigned(item(slot, slot_field::first_word));
        read.bucket_word = read_size(item(slot, slot_field::bucket_word));
        read.first_bit = read_bit(item(slot, slot_field::first_bit));
        const TensorView param =
            read_row(item(segment, segment_field::param), "parameter", name, read.n_elements);
        read.param = param.data;
        read.param_type = read_float_type(param.dtype, "parameter", name, true);
        const TensorView exp_avg =
            read_row(item(segment, segment_field::exp_avg), "exp_avg", name, read.n_elements);
        read.exp_avg = exp_avg.data;
        read.exp_avg_type = read_float_type(exp_avg.dtype, "exp_avg", name, false);
        const nb::handle grad = item(segment, segment_field::grad);
        if (!grad.is_none()) {
            const TensorView view = read_row(grad, "gradient", name, read.n_elements);
            if (read_float_type(view.dtype, "gradient", name, true) != read.param_type) {
                refuse("gradient of " + to_string(name) +
                       ": its dtype is not the parameter's");
            }
            read.grad = view.data;
        }
        const double lr = read_coefficients(read, item(segment, segment_field::coefficients));
        table.is_ordered &= read.bucket_word >= table.end_word;
        table.end_word = read.bucket_word + read.n_words();
        table.segments.push_back(read);
        table.lr.push_back(lr);
    }

private:
    TensorView read_row(nb::handle tensor, const char* what, nb::handle name,
                        std::size_t n_elements) const {
        const TensorView view = tensors_.read(tensor, what, name);
        if (view.n_elements != n_elements) {
            refuse(std::string(what) + " of " + to_string(name) + ": given " +
                   std::to_string(view.n_elements) + " elements, expected " +
                   std::to_string(n_elements));
        }
        return view;
    }

    // Constants are computed in double and rounded once. Returns lr.
    static double read_coefficients(Segment& read, nb::handle coefficients) {
        const auto field = [&](int position) { return read_double(item(coefficients, position)); };
        const double beta1 = field(coefficient_field::beta1);
        const double beta2 = field(coefficient_field::beta2);
        const double lr = field(coefficient_field::lr);
        read.beta1 = static_cast<float>(beta1);
        read.one_minus_beta1 = static_cast<float>(1.0 - beta1);
        read.beta2 = static_cast<float>(beta2);
        read.one_minus_beta2 = static_cast<float>(1.0 - beta2);
        read.decay = static_cast<float>(1.0 - lr * field(coefficient_field::weight_decay));
        read.step_width = static_cast<float>(lr);
        read.grad_scale = static_cast<float>(field(coefficient_field::grad_scale));
        return lr;
    }

    const TensorReader& tensors_;
};

// A packed tensor: (..., blocks, planes, 8) int64.
struct Packed {
    std::uint64_t* words;
    std::size_t n_workers, n_blocks, n_planes;
};

void check_room(const SegmentTable& table, std::size_t n_blocks) {
    if (!table.is_ordered) {
        refuse("segments overlap, or are not in the order of their bucket");
    }
    if (table.end_word > n_blocks * kBlockWords) {
        refuse("a packed tensor of " + std::to_string(n_blocks) + " blocks, but the segments need " +
               std::to_string(table.end_word) + " words");
    }
}

class Core {
public:
    Core(const std::string& instruction_set, nb::object exchange_api) : tensors_(exchange_api) {
        InstructionSet found[kMaxInstructionSets];
        const std::size_t n = list_instruction_sets(found);
        for (std::size_t k = 0; k < n; ++k) {
            if (instruction_set == found[k].name) {
                loops_ = found[k].loops;
            }
        }
        if (!loops_) {
            refuse("instruction_set is '" + instruction_set + "', which this machine does not run");
        }
    }

    SegmentTable read_segments(nb::handle segments) const {
        const SegmentReader reader(tensors_);
        SegmentTable table;
        for (nb::handle segment : segments) {
            reader.read_into(table, segment);
        }
        return table;
    }

    void coin(std::uint64_t key, bool inverted, std::uint64_t first_word, nb::handle out) const {
        const TensorView view = tensors_.read(out, "out", {});
        if (!is_type(view.dtype, kInt, 64)) {
            refuse("out: expected int64");
        }
        const nb::gil_scoped_release released;
        loops_->draw_coin({key, inverted}, first_word, view.n_elements,
                          static_cast<std::uint64_t*>(view.data));
    }

    void encode_signs(const SegmentTable& segments, std::uint64_t key, bool inverted, nb::handle out,
                      nb::handle finite, int threads) const {
        encode_planes(segments, {.vote = Vote::signs, .zero = {key, inverted}}, out, {1, 1}, finite, threads);
    }

    void encode_ternary(const SegmentTable& segments, nb::handle out, nb::handle finite, int threads) const {
        encode_planes(segments, {.vote = Vote::ternary}, out, {2, 2}, finite, threads);
    }

    void encode_levels(const SegmentTable& segments, std::uint64_t key, bool inverted, bool is_l1,
                       double step, nb::handle out, nb::handle finite, int threads) const {
        const Encoding encoding{.vote = Vote::levels, .zero = {key, inverted}, .is_l1 = is_l1, .step = step};
        encode_planes(segments, encoding, out, {1, 8}, finite, threads);
    }

    void encode_directions(const SegmentTable& segments, bool is_bfloat16, nb::handle out,
                           nb::handle finite, int threads) const {
        const std::size_t planes = is_bfloat16 ? 16 : 32;
        const Encoding encoding{.vote = Vote::directions, .direction_type = direction_type(is_bfloat16)};
        encode_planes(segments, encoding, out, {planes, planes}, finite, threads);
    }

    void check_finite(const SegmentTable& segments, nb::handle finite, int threads) const {
        encode(segments, {.vote = Vote::none}, 0, finite, threads);
    }

    void count_signs(nb::handle votes, nb::handle present, nb::handle slots, std::size_t first_block,
                     std::uint64_t key, bool inverted, nb::handle out, int threads) const {
        count(Tally::signs, votes, {1, 1}, present, slots, first_block, {key, inverted}, out, 1, threads);
    }

    void count_signs_or_zero(nb::handle votes, nb::handle present, nb::handle slots,
                             std::size_t first_block, nb::handle out, int threads) const {
        count(Tally::signs_or_zero, votes, {1, 1}, present, slots, first_block, {}, out, 2, threads);
    }

    void count_ternary(nb::handle votes, nb::handle present, nb::handle slots, std::size_t first_block,
                       nb::handle out, int threads) const {
        count(Tally::ternary, votes, {2, 2}, present, slots, first_block, {}, out, 2, threads);
    }

    void count_ones(nb::handle votes, nb::handle present, nb::handle slots, std::size_t first_block,
                    nb::handle out, int threads) const {
        count(Tally::ones, votes, {1, 1}, present, slots, first_block, {}, out, 0, threads);
    }

    void count_levels(nb::handle votes, nb::handle present, nb::handle slots, std::size_t first_block,
                      std::uint64_t key, bool inverted, nb::handle out, int threads) const {
        count(Tally::levels, votes, {1, 8}, present, slots, first_block, {key, inverted}, out, 1, threads);
    }

    void sum_directions(nb::handle votes, nb::handle present, nb::handle slots, std::size_t first_block,
                        bool is_bfloat16, nb::handle out, int threads) const {
        const std::size_t planes = is_bfloat16 ? 16 : 32;
        count(Tally::directions, votes, {planes, planes}, present, slots, first_block, {}, out, 2, threads,
              direction_type(is_bfloat16));
    }

    // `reply_format` is a value of contract.ReplyFormat.
    void commit(const SegmentTable& segments, nb::handle present, nb::handle reply, const std::string& reply_format,
                nb::handle rounding, bool moves_momentum, int threads) const {
        const Packed packed = read_packed(reply, 3, "reply");
        Commitment commitment{.moves_param = true,
                              .moves_momentum = moves_momentum,
                              .format = read_format(reply_format),
                              .reply = packed.words,
                              .n_planes = packed.n_planes};
        const bool counts = commitment.format == ReplyFormat::count;
        const std::size_t planes = commitment.format == ReplyFormat::sign      ? 1
                                   : commitment.format == ReplyFormat::ternary ? 2
                                                                               : packed.n_planes;
        if (packed.n_planes != planes || (counts && (planes == 0 || planes > kMaxPlanes))) {
            refuse("reply: " + std::to_string(packed.n_planes) + " planes do not fit the format " +
                   reply_format);
        }
        set_rounding(commitment, rounding);
        check_room(segments, packed.n_blocks);
        const auto read = mark_present(segments, present, counts);
        const nb::gil_scoped_release released;
        distlion::commit(*loops_, read.data(), read.size(), commitment, threads);
    }

    void update_momentum(const SegmentTable& segments, nb::handle present, int threads) const {
        const auto read = mark_present(segments, present, false);
        const Commitment commitment{.moves_param = false, .moves_momentum = true};
        const nb::gil_scoped_release released;
        distlion::commit(*loops_, read.data(), read.size(), commitment, threads);
    }

    void step_alone(const SegmentTable& segments, nb::handle rounding, int threads) const {
        std::vector<Segment> read = segments.segments;
        for (Segment& segment : read) {
            segment.n_present = segment.grad ? 1 : 0;
        }
        Commitment commitment{.moves_param = true, .moves_momentum = true, .format = ReplyFormat::own};
        set_rounding(commitment, rounding);
        const nb::gil_scoped_release released;
        distlion::commit(*loops_, read.data(), read.size(), commitment, threads);
    }

    // `tensors` is a sequence that keeps them.
    void digests(nb::handle tensors, nb::handle out, int threads) const {
        std::vector<TensorView> views;
        for (nb::handle tensor : tensors) {
            const TensorView view = tensors_.read(tensor, "tensor", {});
            if (view.dtype.bits != 8 && view.dtype.bits != 16 && view.dtype.bits != 32) {
                refuse("tensor: expected elements of 1, 2 or 4 bytes");
            }
            views.push_back(view);
        }
        auto* const found = static_cast<std::uint64_t*>(read_numbers(out, "out", views.size()));
        const nb::gil_scoped_release released;
        for (std::size_t k = 0; k < views.size(); ++k) {
            const TensorView& view = views[k];
            const std::uint64_t total =
                distlion::digest(*loops_, view.data, view.dtype.bits / 8, view.n_elements, threads);
            found[k] = mix(total + view.n_elements);
        }
    }

    void square_sums(nb::handle tensor, nb::handle out, int threads) const {
        const TensorView view = tensors_.read(tensor, "tensor", {});
        const DType type = read_float_type(view.dtype, "tensor", {}, true);
        const TensorView sums = tensors_.read(out, "out", {});
        const std::size_t n_blocks = (view.n_elements + kScaleBlockElements - 1) / kScaleBlockElements;
        if (!is_type(sums.dtype, kFloat, 64) || sums.n_elements != n_blocks) {
            refuse("out: expected float64, one element for " + std::to_string(kScaleBlockElements));
        }
        const nb::gil_scoped_release released;
        distlion::square_sums(*loops_, view.data, type, view.n_elements, static_cast<double*>(sums.data),
                              threads);
    }

    // `sums` is what each row goes on from, and takes what it comes to.
    void checksums(nb::handle rows, nb::handle sums, int threads) const {
        const TensorView view = tensors_.read(rows, "rows", {}, Wants::rows);
        if (!is_type(view.dtype, kUInt, 8)) {
            refuse("rows: expected uint8");
        }
        const ByteRows read{static_cast<const std::uint8_t*>(view.data),
                            static_cast<std::size_t>(view.shape[0]),
                            static_cast<std::size_t>(view.shape[1]), view.row_stride};
        auto* const found = static_cast<std::int64_t*>(read_numbers(sums, "sums", read.n_rows));
        const nb::gil_scoped_release released;
        distlion::checksums(*loops_, read, found, threads);
    }

    void stream_encode(nb::handle grad, nb::handle exp_avg, nb::handle out, int threads) const {
        const TensorView words = tensors_.read(out, "out", {});
        if (!is_type(words.dtype, kInt, 64)) {
            refuse("out: expected int64, one word for 64 elements");
        }
        const float* g = read_stream(grad, words.n_elements);
        const float* m = read_stream(exp_avg, words.n_elements);
        const nb::gil_scoped_release released;
        distlion::stream_encode(*loops_, g, m, words.n_elements,
                                static_cast<std::uint64_t*>(words.data), threads);
    }

    // `reply` None: what a step of plain Lion reads and writes.
    void stream_commit(nb::handle grad, nb::handle exp_avg, nb::handle param, nb::handle reply,
                       int threads) const {
        const std::size_t n_words = tensors_.read(grad, "grad", {}).n_elements / kWordElements;
        const std::uint64_t* bits = nullptr;
        if (!reply.is_none()) {
            const TensorView words = tensors_.read(reply, "reply", {});
            if (!is_type(words.dtype, kInt, 64) || words.n_elements != n_words) {
                refuse("reply: expected int64, one word for 64 elements");
            }
            bits = static_cast<const std::uint64_t*>(words.data);
        }
        const float* g = read_stream(grad, n_words);
        float* m = read_stream(exp_avg, n_words);
        float* x = read_stream(param, n_words);
        const nb::gil_scoped_release released;
        distlion::stream_commit(*loops_, g, m, x, n_words, bits, threads);
    }

private:
    struct PlaneRange {
        std::size_t least, most;
    };

    static DType direction_type(bool is_bfloat16) {
        return is_bfloat16 ? DType::bfloat16 : DType::float32;
    }

    static ReplyFormat read_format(const std::string& name) {
        if (name == "sign") return ReplyFormat::sign;
        if (name == "ternary") return ReplyFormat::ternary;
        if (name == "count") return ReplyFormat::count;
        refuse("reply_format is '" + name + "', expected 'sign', 'ternary' or 'count'");
    }

    // `rounding` is (key, inverted) of a coin, or None.
    static void set_rounding(Commitment& commitment, nb::handle rounding) {
        if (!rounding.is_none()) {
            commitment.rounds_stochastically = true;
            commitment.rounding = {read_unsigned(item(rounding, 0)), nb::cast<bool>(item(rounding, 1))};
        }
    }

    // Where `n` numbers of 64 bits go.
    void* read_numbers(nb::handle out, const char* what, std::size_t n) const {
        const TensorView view = tensors_.read(out, what, {});
        if (!is_type(view.dtype, kInt, 64) || view.n_elements != n) {
            refuse(std::string(what) + ": expected int64, " + std::to_string(n) + " elements");
        }
        return view.data;
    }

    float* read_stream(nb::handle tensor, std::size_t n_words) const {
        const TensorView view = tensors_.read(tensor, "tensor", {});
        if (!is_type(view.dtype, kFloat, 32) || view.n_elements != n_words * kWordElements) {
            refuse("expected float32, 64 elements for a word");
        }
        return static_cast<float*>(view.data);
    }

    Packed read_packed(nb::handle tensor, std::size_t n_dims, const char* what) const {
        const TensorView view = tensors_.read(tensor, what, {}, Wants::shape);
        if (!is_type(view.dtype, kInt, 64) || view.shape.size() != n_dims ||
            view.shape.back() != static_cast<std::int64_t>(kBlockWords)) {
            refuse(std::string(what) + ": expected int64 of shape (" +
                   (n_dims == 4 ? "workers, " : "") + "blocks, planes, 8)");
        }
        return {static_cast<std::uint64_t*>(view.data),
                n_dims == 4 ? static_cast<std::size_t>(view.shape[0]) : 1,
                static_cast<std::size_t>(view.shape[n_dims - 3]),
                static_cast<std::size_t>(view.shape[n_dims - 2])};
    }

    // Copies with the numbers of voters, and the step width a = lr / n of those that count.
    static std::vector<Segment> mark_present(const SegmentTable& table, nb::handle present, bool counts) {
        std::vector<Segment> marked = table.segments;
        std::size_t n_read = 0;
        for (nb::handle number : present) {
            if (n_read == marked.size()) {
                refuse("present: more numbers than segments");
            }
            const auto n_present = nb::cast<std::int64_t>(number);
            if (n_present < 0) {
                refuse("present: given " + std::to_string(n_present) + ", expected 0 or more");
            }
            marked[n_read].n_present = n_present;
            if (counts && n_present > 0) {
                marked[n_read].step_width =
                    static_cast<float>(table.lr[n_read] / static_cast<double>(n_present));
            }
            ++n_read;
        }
        if (n_read != marked.size()) {
            refuse("present: fewer numbers than segments");
        }
        return marked;
    }

    void encode_planes(const SegmentTable& segments, Encoding encoding, nb::handle out, PlaneRange planes,
                       nb::handle finite, int threads) const {
        const Packed packed = read_packed(out, 3, "out");
        if (packed.n_planes < planes.least || packed.n_planes > planes.most) {
            refuse("out: " + std::to_string(packed.n_planes) + " planes given, expected " +
                   std::to_string(planes.least) +
                   (planes.least == planes.most ? "" : " to " + std::to_string(planes.most)));
        }
        encoding.out = packed.words;
        encoding.n_planes = packed.n_planes;
        check_room(segments, packed.n_blocks);
        encode(segments, encoding, packed.n_blocks, finite, threads);
    }

    void encode(const SegmentTable& table, const Encoding& encoding, std::size_t n_blocks,
                nb::handle finite, int threads) const {
        const std::vector<Segment>& segments = table.segments;
        const TensorView flags = tensors_.read(finite, "finite", {});
        if (!is_type(flags.dtype, kBool, 8) || flags.n_elements != segments.size()) {
            refuse("finite: expected bool, " + std::to_string(segments.size()) + " elements");
        }
        const nb::gil_scoped_release released;
        distlion::encode(*loops_, segments.data(), segments.size(), encoding, n_blocks, threads,
                         static_cast<bool*>(flags.data));
    }

    // `wanted_out_planes` 0: as many as the number of workers needs.
    void count(Tally tally, nb::handle votes, PlaneRange vote_planes, nb::handle present,
               nb::handle slots, std::size_t first_block, Coin tie, nb::handle out,
               std::size_t wanted_out_planes, int threads, DType direction = DType::float32) const {
        const Packed ballots = read_packed(votes, 4, "votes");
        const Packed reply = read_packed(out, 3, "out");
        if (ballots.n_workers == 0 || ballots.n_workers > kMaxWorkers) {
            refuse("votes: given those of " + std::to_string(ballots.n_workers) +
                   " workers, expected 1 to " + std::to_string(kMaxWorkers));
        }
        if (ballots.n_planes < vote_planes.least || ballots.n_planes > vote_planes.most) {
            refuse("votes: they have " + std::to_string(ballots.n_planes) + " planes");
        }
        std::size_t needed = wanted_out_planes;
        if (needed == 0) {
            while (ballots.n_workers >> needed) {
                ++needed;
            }
        }
        if (reply.n_blocks != ballots.n_blocks || reply.n_planes != needed) {
            refuse("out: given " + std::to_string(reply.n_blocks) + " blocks of " +
                   std::to_string(reply.n_planes) + " planes, expected " +
                   std::to_string(ballots.n_blocks) + " of " + std::to_string(needed));
        }
        const Counting counting{tally,
                                ballots.words,
                                ballots.n_blocks * ballots.n_planes * kBlockWords,
                                ballots.n_planes,
                                reply.words,
                                reply.n_planes,
                                tie,
                                direction};
        std::vector<std::uint32_t> voters;
        const std::vector<Run> runs =
            read_runs(present, slots, ballots.n_workers, first_block, ballots.n_blocks, voters);
        const nb::gil_scoped_release released;
        distlion::count(*loops_, runs.data(), runs.size(), counting, ballots.n_blocks, threads);
    }

    // Cut the bucket's parameters to the shard; leave out those that nobody votes for.
    std::vector<Run> read_runs(nb::handle present, nb::handle slots, std::size_t n_workers,
                               std::size_t first_block, std::size_t n_blocks,
                               std::vector<std::uint32_t>& voters) const {
        const TensorView flags = tensors_.read(present, "present", {}, Wants::shape);
        const Py_ssize_t n_slots_or_error = PyTuple_Size(slots.ptr());
        if (n_slots_or_error < 0) {
            throw nb::python_error();
        }
        const auto n_slots = static_cast<std::size_t>(n_slots_or_error);
        if (!is_type(flags.dtype, kBool, 8) || flags.shape.size() != 2 ||
            flags.shape[0] != static_cast<std::int64_t>(n_workers) ||
            flags.shape[1] != static_cast<std::int64_t>(n_slots)) {
            refuse("present: expected bool of shape (" + std::to_string(n_workers) + ", " +
                   std::to_string(n_slots) + ")");
        }
        const auto* is_present = static_cast<const std::uint8_t*>(flags.data);
        voters.reserve(n_workers * n_slots);  // runs point into it
        if (first_block > kMostCounted) {
            refuse("first_block is " + std::to_string(first_block) + ", expected at most 2^56");
        }
        const std::size_t begin = first_block * kBlockWords;
        const std::size_t end = begin + n_blocks * kBlockWords;
        std::vector<Run> runs;
        for (std::size_t k = 0; k < n_slots; ++k) {
            const nb::handle slot = item(slots, static_cast<Py_ssize_t>(k));
            const std::size_t n_elements = read_size(item(slot, slot_field::n_elements));
            const std::size_t start = read_size(item(slot, slot_field::bucket_word));
            const std::size_t stop = start + (n_elements + kWordElements - 1) / kWordElements;
            const std::size_t first = start > begin ? start : begin;
            const std::size_t last = stop < end ? stop : end;
            if (first >= last) {
                continue;
            }
            const std::size_t before = voters.size();
            for (std::size_t worker = 0; worker < n_workers; ++worker) {
                if (is_present[worker * n_slots + k]) {
                    voters.push_back(static_cast<std::uint32_t>(worker));
                }
            }
            if (voters.size() == before) {
                continue;
            }
            const std::size_t skipped = first - start;
            const std::size_t rest = n_elements - skipped * kWordElements;
            const std::size_t room = (last - first) * kWordElements;
            runs.push_back({voters.data() + before, voters.size() - before, first - begin, last - begin,
                            rest < room ? rest : room,
                            read_unsigned(item(slot, slot_field::first_word)) + skipped,
                            read_bit(item(slot, slot_field::first_bit))});
        }
        return runs;
    }

    TensorReader tensors_;
    const Loops* loops_ = nullptr;
};

std::vector<std::string> name_instruction_sets() {
    InstructionSet found[kMaxInstructionSets];
    const std::size_t n = list_instruction_sets(found);
    std::vector<std::string> names;
    for (std::size_t k = 0; k < n; ++k) {
        names.emplace_back(found[k].name);
    }
    return names;
}

}  // namespace

NB_MODULE(_cpu, m) {
    using namespace nb::literals;
    // The kernels that were chosen live as long as the process.
    nb::set_leak_warnings(false);
    m.doc() = "The CPU core: C++ loops over packed votes. Use distlion.kernels.cpu.";
    m.def("instruction_sets", &name_instruction_sets,
          "Names of the instruction sets that this machine runs, the plainest first.");
    nb::class_<SegmentTable>(m, "SegmentTable", "The segments of a bucket, read once for several ops.");
    nb::class_<Core>(m, "Core", "The ops of contract.Kernels, for one instruction set.")
        .def(nb::init<const std::string&, nb::object>(), "instruction_set"_a, "exchange_api"_a.none())
        .def("read_segments", &Core::read_segments, "segments"_a)
        .def("coin", &Core::coin, "key"_a, "inverted"_a, "first_word"_a, "out"_a)
        .def("encode_signs", &Core::encode_signs, "segments"_a, "key"_a, "inverted"_a, "out"_a, "finite"_a,
             "threads"_a)
        .def("encode_ternary", &Core::encode_ternary, "segments"_a, "out"_a, "finite"_a, "threads"_a)
        .def("encode_levels", &Core::encode_levels, "segments"_a, "key"_a, "inverted"_a, "is_l1"_a,
             "step"_a, "out"_a, "finite"_a, "threads"_a)
        .def("encode_directions", &Core::encode_directions, "segments"_a, "is_bfloat16"_a, "out"_a,
             "finite"_a, "threads"_a)
        .def("check_finite", &Core::check_finite, "segments"_a, "finite"_a, "threads"_a)
        .def("count_signs", &Core::count_signs, "votes"_a, "present"_a, "slots"_a, "first_block"_a,
             "key"_a, "inverted"_a, "out"_a, "threads"_a)
        .def("count_signs_or_zero", &Core::count_signs_or_zero, "votes"_a, "present"_a, "slots"_a,
             "first_block"_a, "out"_a, "threads"_a)
        .def("count_ternary", &Core::count_ternary, "votes"_a, "present"_a, "slots"_a, "first_block"_a,
             "out"_a, "threads"_a)
        .def("count_ones", &Core::count_ones, "votes"_a, "present"_a, "slots"_a, "first_block"_a, "out"_a,
             "threads"_a)
        .def("count_levels", &Core::count_levels, "votes"_a, "present"_a, "slots"_a, "first_block"_a,
             "key"_a, "inverted"_a, "out"_a, "threads"_a)
        .def("sum_directions", &Core::sum_directions, "votes"_a, "present"_a, "slots"_a, "first_block"_a,
             "is_bfloat16"_a, "out"_a, "threads"_a)
        .def("commit", &Core::commit, "segments"_a, "present"_a, "reply"_a, "reply_format"_a,
             "rounding"_a.none(), "moves_momentum"_a, "threads"_a)
        .def("update_momentum", &Core::update_momentum, "segments"_a, "present"_a, "threads"_a)
        .def("step_alone", &Core::step_alone, "segments"_a, "rounding"_a.none(), "threads"_a)
        .def("digests", &Core::digests, "tensors"_a, "out"_a, "threads"_a)
        .def("square_sums", &Core::square_sums, "tensor"_a, "out"_a, "threads"_a)
        .def("checksums", &Core::checksums, "rows"_a, "sums"_a, "threads"_a)
        .def("stream_encode", &Core::stream_encode, "grad"_a, "exp_avg"_a, "out"_a, "threads"_a)
        .def("stream_commit", &Core::stream_commit, "grad"_a, "exp_avg"_a, "param"_a, "reply"_a.none(),
             "threads"_a);
}
