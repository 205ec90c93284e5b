// How the segments of a bucket are read from the named tuples of Python.

#pragma once

#include <string>
#include <vector>

#include "core.hpp"
#include "python_tensors.hpp"

namespace distlion {

// Named tuples are read by position, which costs next to nothing.
inline nb::handle item(nb::handle tuple, Py_ssize_t position) {
    PyObject* value = PyTuple_GetItem(tuple.ptr(), position);
    if (!value) {
        throw nb::python_error();
    }
    return value;
}

inline double read_double(nb::handle value) {
    const double number = PyFloat_AsDouble(value.ptr());
    if (number == -1.0 && PyErr_Occurred()) {
        throw nb::python_error();
    }
    return number;
}

// Of elements, words and blocks; sums of two do not overflow.
inline constexpr std::size_t kMostCounted = std::size_t{1} << 56;

inline std::size_t read_size(nb::handle value) {
    const std::size_t number = PyLong_AsSize_t(value.ptr());
    if (number == SIZE_MAX && PyErr_Occurred()) {
        throw nb::python_error();
    }
    if (number > kMostCounted) {
        refuse("a slot of " + std::to_string(number) + " elements or words: expected at most 2^56");
    }
    return number;
}

inline std::uint64_t read_unsigned(nb::handle value) {
    const std::uint64_t number = PyLong_AsUnsignedLongLong(value.ptr());
    if (number == ~std::uint64_t{0} && PyErr_Occurred()) {
        throw nb::python_error();
    }
    return number;
}

inline unsigned read_bit(nb::handle value) {
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
enum { beta1, beta2, lr, weight_decay, grad_scale, cautious };
}

inline DType read_float_type(nb::dlpack::dtype dtype, const char* what, nb::handle whose, bool may_be_half) {
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
        read.is_cautious = nb::cast<bool>(item(coefficients, coefficient_field::cautious));
        return lr;
    }

    const TensorReader& tensors_;
};

inline void check_room(const SegmentTable& table, std::size_t n_blocks) {
    if (!table.is_ordered) {
        refuse("segments overlap, or are not in the order of their bucket");
    }
    if (table.end_word > n_blocks * kBlockWords) {
        refuse("a packed tensor of " + std::to_string(n_blocks) + " blocks, but the segments need " +
               std::to_string(table.end_word) + " words");
    }
}

// Copies with the numbers of voters, and the step width a = lr / n of those that count.
inline std::vector<Segment> mark_present(const SegmentTable& table, nb::handle present, bool counts) {
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

}  // namespace distlion
