#include "parallel/utils.hpp"

#include "parallel/reduce.hpp"

namespace llaisys::parallel {

std::string CallSite::text() const {
    return llaisys::text(op_type_name(type), ": group ", options.name, ", rank ", rank, " of ",
                         world(), ", ", device::runtime_of(options.device).name, ":",
                         options.device_id);
}

void CallSite::check_tensor(const char *name, const tensor_t &tensor) const {
    check(tensor.defined(), name, ": got none, expected a tensor");
    check(tensor.device() == options.device && tensor.device_id() == options.device_id, name,
          " is on ", device::runtime_of(tensor.device()).name, ":", tensor.device_id());
    check(tensor.is_contiguous(), name, " must be contiguous, got strides ", tensor.strides());
}

void CallSite::check_shards(const char *large_name, const tensor_t &large, const char *small_name,
                            const tensor_t &small) const {
    check_tensor(large_name, large);
    check_tensor(small_name, small);
    check(large.dtype() == small.dtype(), large_name, " is ", name_of(large.dtype()), ", ",
          small_name, " ", name_of(small.dtype()));
    check(large.elements() == small.elements() * world(), large_name, " must have ", world(),
          " times the elements of ", small_name, ", got ", large.elements(), " and ",
          small.elements());
}

void CallSite::check_rank(const char *name, int other) const {
    check(other >= 0 && other < world(), name, " must be in [0, ", world(), "), got ", other);
}

void CallSite::check_peer(const char *name, int other) const {
    check_rank(name, other);
    check(other != rank, name, " must be another rank, got its own, ", other);
}

void CallSite::check_reduction(DType dtype, function::ReduceOpType op) const {
    check(is_reducible(dtype), "dtype must be f32, f16, bf16, i32 or i64, got ", name_of(dtype));
    check(op >= function::ReduceOpType::kSum && op <= function::ReduceOpType::kAvg,
          "reduce_op must be in [0, 4], got ", int(op));
}

void CallSite::check_addition(const tensor_t &sum, const tensor_t &terms) const {
    check_tensor("sum", sum);
    check_tensor("terms", terms);
    check(sum.dtype() == LLAISYS_DTYPE_F32 && is_activation(terms.dtype()),
          "sum must be f32 and terms f32, f16 or bf16, got ", name_of(sum.dtype()), " and ",
          name_of(terms.dtype()));
    check(sum.elements() == terms.elements(), "sum has ", sum.elements(), " elements, terms ",
          terms.elements());
}

} // namespace llaisys::parallel
