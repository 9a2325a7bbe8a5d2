// Queues backward: the family that serves a call, and its launches.
#include <algorithm>
#include <string>

#include "kernels/cuda/common/access.hpp"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/gradients/gradients.hpp"
#include "kernels/cuda/gradients/sums.hpp"
#include "kernels/cuda/hopper/gradients_sm90.hpp"
#include "kernels/features.hpp"
#include "longspan/error.hpp"
#include "src/base/check.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr std::size_t kAlign = 256;

std::size_t align(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

/// A family of kernels of backward. The first one that accepts a call serves it.
struct GradientFamily {
  bool (*accepts)(const GradientParams& p);
  GradientKernel (*kernel)(const GradientParams& p, bool rows_own);
};

int widest_dim(const GradientParams& p) { return std::max(p.head_dim, p.value_dim); }

constexpr GradientFamily kFamilies[] = {
    {[](const GradientParams& p) { return p.dtype != DType::fp32 && widest_dim(p) <= 256; },
     [](const GradientParams& p, bool rows_own) {
       return p.dtype == DType::bf16 ? gradients_bf16(rows_own, widest_dim(p))
                                     : gradients_fp16(rows_own, widest_dim(p));
     }},
    {[](const GradientParams& p) {
       return p.dtype == DType::fp32 && p.tf32 && widest_dim(p) <= 128;
     },
     [](const GradientParams& p, bool rows_own) {
       return gradients_tf32(rows_own, widest_dim(p));
     }},
    {[](const GradientParams&) { return true; },
     [](const GradientParams& p, bool rows_own) {
       return gradients_fp32(rows_own, rows_own ? p.head_dim : widest_dim(p));
     }},
};

const GradientFamily& serving(const GradientParams& p, const Gpu& gpu) {
  for (const GradientFamily& family : kFamilies)
    if (family.accepts(p) && family.kernel(p, true).shared_bytes <= gpu.block_bytes &&
        family.kernel(p, false).shared_bytes <= gpu.block_bytes)
      return family;
  throw Unsupported("gradients: a thread block of this GPU may have " +
                    std::to_string(gpu.block_bytes) +
                    " bytes of shared memory, and no kernel of backward needs so few");
}

/// The plan of the launch of dq, or of dk and dv, without its scratch.
GradientPlan plan_of(const GradientParams& p, const GradientKernel& kernel, bool rows_own,
                     const Gpu& gpu) {
  const auto panels = [&](int dim) {
    return (GradientSums::padded(dim) + kernel.columns - 1) / kernel.columns;
  };
  GradientPlan plan;
  plan.rows_own = rows_own;
  plan.tile = kernel.tile;
  plan.columns = kernel.columns;
  const std::int64_t owned = rows_own ? p.tokens * group_of(p) : p.dk.rows;
  plan.tiles =
      owned == 0 || p.batch.size == 0 ? 0 : static_cast<int>(owned / kernel.tile + p.batch.size);
  plan.first_panels = panels(p.head_dim);
  plan.second_panels = rows_own ? 0 : panels(p.value_dim);
  plan.works = plan.tiles * p.kv_heads * plan.panels();
  plan.blocks =
      p.invariant ? std::min(plan.works, gpu.multiprocessors * kernel.blocks) : plan.works;
  plan.by_panels = Divisor(static_cast<std::uint32_t>(plan.panels()));
  plan.by_tiles = Divisor(static_cast<std::uint32_t>(std::max(plan.tiles, 1)));
  plan.by_group = Divisor(static_cast<std::uint32_t>(group_of(p)));
  const auto aligned = [](const auto& rows, DType dtype, int dim) {
    return dim % 8 == 0 && is_aligned<8>(rows, dtype);
  };
  plan.q_aligned = aligned(p.q, p.q_dtype, p.head_dim);
  plan.k_aligned = aligned(p.k, p.kv_dtype, p.head_dim);
  plan.v_aligned = aligned(p.v, p.kv_dtype, p.value_dim);
  plan.dout_aligned = aligned(p.dout, p.dout_dtype, p.value_dim);
  return plan;
}

std::size_t slope_bytes(const GradientParams& p) {
  return align(static_cast<std::size_t>(p.tokens * p.heads) * sizeof(double));
}

void queue(const GradientParams& p, const GradientKernel& kernel, const GradientPlan& plan,
           cudaStream_t stream) {
  if (plan.works == 0) return;
  LONGSPAN_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel.kernel),
                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     kernel.shared_bytes));
  launch_kernel(
      kernel.kernel,
      {dim3(static_cast<unsigned>(plan.blocks)), dim3(static_cast<unsigned>(kernel.threads)),
       stream, static_cast<std::size_t>(kernel.shared_bytes)},
      p, plan);
}

void check(const GradientParams& p) {
  check_head_dims(p.head_dim, p.value_dim);
  check_features(p, Device::cuda);
  if (p.sees_prefix() && p.invariant)
    throw Unsupported("gradients of a prefix with window or chunks and invariant: leave it off");
  if (p.pages || is_fp8(p.q_dtype) || is_fp8(p.kv_dtype) || is_fp8(p.dout_dtype))
    throw Unsupported("gradients of pages or of fp8: they are of contiguous fp32, fp16 and bf16");
  if (!p.k.dense() || !p.v.dense())
    throw Unsupported("gradients of keys or values whose rows are not dense: copy them first");
  if (p.bias.qq && is_fp8(p.bias.qq.values.dtype))
    throw Unsupported(std::string("qq_bias of ") + name(p.bias.qq.values.dtype) +
                      ": the CUDA kernels take fp32, fp16 and bf16");
}

/// One interval of what rows see (Geometry::visible).
void attend_interval(const GradientParams& p, const Gpu& gpu, cudaStream_t stream) {
  if (gpu.hopper_code && sm90::takes_gradients(p)) return sm90::attend_gradients(p, stream);
  const GradientFamily& family = serving(p, gpu);
  std::byte* scratch = p.scratch;
  const auto take = [&](std::size_t bytes) {
    std::byte* const part = scratch;
    scratch += align(bytes);
    return part;
  };
  double* const slopes =
      reinterpret_cast<double*>(take(p.biases.slopes != nullptr ? slope_bytes(p) : 0));
  GradientPlan plans[2];
  GradientKernel kernels[2];
  std::size_t stack = 0;
  for (const bool rows_own : {false, true}) {
    kernels[rows_own] = family.kernel(p, rows_own);
    plans[rows_own] = plan_of(p, kernels[rows_own], rows_own, gpu);
    if (p.invariant) stack = std::max(stack, plans[rows_own].stack_bytes());
  }
  float* const of_stack = reinterpret_cast<float*>(take(stack));  // of one launch after the other
  const auto needed = static_cast<std::size_t>(scratch - p.scratch);
  if (needed > p.scratch_bytes)
    throw InputError("attend_gradients needs " + std::to_string(needed) +
                     " bytes of scratch and was given " + std::to_string(p.scratch_bytes) +
                     ": plan for these tokens, sequences and lengths");
  for (const bool rows_own : {false, true}) {
    if ((rows_own ? p.dq : p.dk).data == nullptr) continue;
    plans[rows_own].stack = of_stack;
    if (rows_own && p.biases.slopes != nullptr) plans[rows_own].slopes = slopes;
    queue(p, kernels[rows_own], plans[rows_own], stream);
  }
  if (p.biases.slopes != nullptr && p.dq.data != nullptr && p.batch.size > 0)
    add_slope_gradients(p, slopes, stream);
  if (p.biases.qq != nullptr && p.bias.qq.width > 0 && p.tokens > 0) add_qq_gradients(p, stream);
}

}  // namespace

bool stores_gradients(const GradientParams& p, const Gpu& gpu) {
  return gpu.hopper_code && !p.sees_prefix() && sm90::stores_gradients(p);
}

void attend_gradients(const GradientParams& p, const Gpu& gpu, cudaStream_t stream) {
  check(p);
  if (p.stores && !stores_gradients(p, gpu))
    throw InputError("attend_gradients was given places for gradients that it leaves as sums");
  attend_interval(p, gpu, stream);
  if (!p.sees_prefix()) return;
  GradientParams rest = p;  // as kernels take one interval
  rest.only_prefix = rest.resume_rows = rest.resume_keys = true;
  attend_interval(rest, gpu, stream);
}

std::size_t gradient_scratch(const GradientParams& bounds, const Gpu& gpu) {
  std::size_t stack = 0;
  for (const GradientFamily& family : kFamilies) {
    if (!bounds.invariant || !family.accepts(bounds)) continue;
    for (const bool rows_own : {false, true}) {
      const GradientKernel kernel = family.kernel(bounds, rows_own);
      GradientPlan plan;
      plan.tile = kernel.tile;
      plan.columns = kernel.columns;
      plan.blocks = gpu.multiprocessors * kernel.blocks;
      stack = std::max(stack, plan.stack_bytes());
    }
  }
  for (const bool rows_own : {false, true})  // a layer asks when it is made
    load_code(serving(bounds, gpu).kernel(bounds, rows_own).kernel);
  if (gpu.hopper_code) sm90::load_gradients();
  return std::max(slope_bytes(bounds) + align(stack), align(sm90::kGradientScratch));
}

}  // namespace longspan::kernels::cuda
