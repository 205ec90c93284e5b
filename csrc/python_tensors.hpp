// How tensors of Python are read: once, and checked, or refused with distlion's own error.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

namespace nb = nanobind;

namespace distlion {

[[noreturn]] inline void refuse(const std::string& message) {
    const nb::object error = nb::module_::import_("distlion.errors").attr("InvalidArgumentError");
    PyErr_SetString(error.ptr(), message.c_str());
    throw nb::python_error();
}

inline std::string to_string(nb::handle object) { return nb::str(object).c_str(); }

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
inline std::string describe(const char* what, nb::handle whose) {
    return std::string(what) + (whose.is_valid() ? " of " + to_string(whose) : "");
}

inline constexpr auto kInt = static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int);
inline constexpr auto kUInt = static_cast<std::uint8_t>(nb::dlpack::dtype_code::UInt);
inline constexpr auto kFloat = static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float);
inline constexpr auto kBfloat = static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat);
inline constexpr std::uint8_t kOther = 0xFF;
inline constexpr auto kBool = static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bool);

inline bool is_type(nb::dlpack::dtype dtype, std::uint8_t code, int bits) {
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

// The table, null if there is none or one of another version.
inline const ExchangeApi* find_exchange_api(nb::handle exchange_api) {
    if (exchange_api.is_none()) {
        return nullptr;
    }
    auto* api =
        static_cast<const ExchangeApi*>(PyCapsule_GetPointer(exchange_api.ptr(), "dlpack_exchange_api"));
    if (!api) {
        throw nb::python_error();
    }
    return api->version.major == 1 ? api : nullptr;
}

// Reads tensors by the exchange table, a dozen nanoseconds each, or by their Python attributes.
class TensorReader {
public:
    explicit TensorReader(nb::handle exchange_api) : api_(find_exchange_api(exchange_api)) {}

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

    const ExchangeApi* api_;
};

}  // namespace distlion
