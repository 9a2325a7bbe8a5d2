// What the products of backward read and write, for all families.
#pragma once

#include "kernels/cuda/gradients/loop.cuh"

namespace longspan::kernels::cuda {

/// The four tensors, by the side that they are on: scores are products of the first ones, and
/// gradients of weights those of the second ones.
template <class Work, bool kRowsOwn>
class GradientOperands {
 public:
  __device__ __forceinline__ GradientOperands(const GradientParams& p, const GradientPlan& plan,
                                              const Work& work)
      : p_(p),
        plan_(plan),
        work_(work),
        q_{p.q.data, p.q_dtype, p.head_dim, plan.q_aligned},
        k_{p.k.data, p.kv_dtype, p.head_dim, plan.k_aligned},
        v_{p.v.data, p.kv_dtype, p.value_dim, plan.v_aligned},
        dout_{p.dout.data, p.dout_dtype, p.value_dim, plan.dout_aligned} {}

 protected:
  __device__ const GradientTensor& own_first() const { return kRowsOwn ? q_ : k_; }
  __device__ const GradientTensor& own_second() const { return kRowsOwn ? dout_ : v_; }
  __device__ const GradientTensor& stream_first() const { return kRowsOwn ? k_ : q_; }
  __device__ const GradientTensor& stream_second() const { return kRowsOwn ? v_ : dout_; }

  /// dv is made of weights, and of dout, which is a second one.
  __device__ bool of_values() const { return !kRowsOwn && work_.gradient == Gradient::dv; }

  __device__ const GradientSums& target() const {
    return kRowsOwn ? p_.dq : of_values() ? p_.dv : p_.dk;
  }
  /// The row of the target at which the owned ones begin.
  __device__ std::int64_t first_sum() const {
    return work_.first + (kRowsOwn ? work_.sequence.first_row * group_of(p_)
                                   : first_key_sum(p_, work_.sequence.index));
  }
  __device__ bool resumes() const { return kRowsOwn ? p_.resume_rows : p_.resume_keys; }

  /// Whether the gradients of slopes are made here, a row at a time.
  __device__ bool wants_slopes() const {
    return kRowsOwn && plan_.slopes != nullptr && work_.column == 0;
  }
  __device__ double& slope_of(int own) const {
    return plan_.slopes[work_.kv_head * p_.tokens * group_of(p_) + first_sum() + own];
  }

  const GradientParams& p_;
  const GradientPlan& plan_;
  const Work& work_;
  const GradientTensor q_, k_, v_, dout_;
};

}  // namespace longspan::kernels::cuda
