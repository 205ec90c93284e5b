// The makes of tensors: one call tells whether others, or the same ones later, are alike.

#pragma once

#include <vector>

#include "python_tensors.hpp"

namespace distlion {

class Makes {
public:
    // Tensors are read by the exchange table alone, on any device.
    Makes(nb::typed<nb::list, nb::object> tensors, nb::object exchange_api) : api_(find_exchange_api(exchange_api)) {
        for (nb::handle tensor : tensors) {
            nb::dlpack::dltensor read;
            if (!api_ || api_->tensor_from_object(tensor.ptr(), &read) != 0) {
                PyErr_Clear();
                refuse("tensors: given one that torch's exchange table cannot read");
            }
            makes_.push_back({read.dtype, read.device, {read.shape, read.shape + read.ndim}});
        }
    }

    // Whether each tensor has the dtype, the device and the shape of its make, and is contiguous, with
    // memory. None is alike if `may_be_none`.
    bool fit(nb::typed<nb::list, nb::object> tensors, bool may_be_none) const {
        if (tensors.size() != makes_.size()) {
            return false;
        }
        for (std::size_t k = 0; k < makes_.size(); ++k) {
            const nb::handle tensor = PyList_GetItem(tensors.ptr(), static_cast<Py_ssize_t>(k));
            if (!(tensor.is_none() ? may_be_none : fits(tensor, makes_[k]))) {
                return false;
            }
        }
        return true;
    }

private:
    struct Make {
        nb::dlpack::dtype dtype;
        nb::dlpack::device device;
        std::vector<std::int64_t> shape;
    };

    bool fits(nb::handle tensor, const Make& make) const {
        nb::dlpack::dltensor read;
        if (api_->tensor_from_object(tensor.ptr(), &read) != 0) {
            PyErr_Clear();  // no tensor, or a sparse one
            return false;
        }
        bool is_alike = is_type(read.dtype, make.dtype.code, make.dtype.bits) &&
                        read.device.device_type == make.device.device_type &&
                        read.device.device_id == make.device.device_id &&
                        static_cast<std::size_t>(read.ndim) == make.shape.size();
        std::int64_t n_elements = 1;
        for (std::size_t dim = make.shape.size(); is_alike && dim-- > 0;) {
            const bool is_next = !read.strides || read.shape[dim] == 1 || read.strides[dim] == n_elements;
            is_alike = read.shape[dim] == make.shape[dim] && is_next;
            n_elements *= read.shape[dim];
        }
        return is_alike && read.data && n_elements > 0;
    }

    const ExchangeApi* api_;
    std::vector<Make> makes_;
};

}  // namespace distlion
