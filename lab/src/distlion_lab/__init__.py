"""Programs around the library: training runs, comparisons, network emulation, plans, figures."""
