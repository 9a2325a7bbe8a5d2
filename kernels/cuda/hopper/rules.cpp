// The calls that the Hopper kernels accept. All of it is evaluated on the host, for any GPU.
#include <algorithm>

#include "kernels/cuda/combine/splits.hpp"
#include "kernels/cuda/common/access.hpp"
#include "kernels/cuda/dispatch/launch.hpp"
#include "kernels/cuda/hopper/attend_sm90.hpp"
#include "kernels/cuda/hopper/gradients_sm90.hpp"

namespace longspan::kernels::sm90 {
namespace {

int wider_dim(const AttendParams& params) { return std::max(params.head_dim, params.value_dim); }

/// Whether the family has an instance for the heads. It always has one whose keys and values are
/// both as wide as the wider of the two. TMA copies 16 bytes at a time.
bool has_instance(const AttendParams& params, cuda::Family family) {
  return params.dtype != DType::fp32 && params.head_dim >= kLeastDim &&
         wider_dim(params) <= cuda::widest(family) && params.head_dim % 8 == 0 &&
         params.value_dim % 8 == 0;
}
bool has_square_instance(const AttendParams& params, cuda::Family family) {
  return params.head_dim == params.value_dim && has_instance(params, family);
}

/// The requirements of the kernels that fold a row's keys in one pass, whatever their products.
bool is_one_pass(const AttendParams& params) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  return !params.invariant && fits_query_map(params) && params.shard.layout != Layout::listed &&
         !params.parts && params.score.scale > 0 && params.tokens < kMost &&
         params.shard.length < kMost;
}

/// Whether PageProducer can read the pages, in tiles that have it (Tile::kPages).
bool is_in_chunks(const AttendParams& params) {
  const auto chunks = [&](const KvRows& rows, int dim) {
    return rows.dense() && cuda::access_of(rows, params.pages, 2, dim) == cuda::Access::chunks;
  };
  return wider_dim(params) > 80 && wider_dim(params) <= 192 && params.kv_dtype == params.dtype &&
         chunks(params.k, params.head_dim) && chunks(params.v, params.value_dim);
}

/// Whether queries, keys and values have the layout that the 16-bit tiles read.
bool are_rows_plain(const AttendParams& params) {
  AttendParams unbiased = params;  // ALiBi has its own instance; qq_bias has none
  unbiased.bias.slopes = {};
  if (params.pages) {
    if (!is_in_chunks(params)) return false;
    unbiased.pages = {};
    const auto rows = [&](int dim) {
      return KvRows(nullptr, std::int64_t{params.kv_heads} * dim, dim);
    };
    unbiased.k = rows(params.head_dim);
    unbiased.v = rows(params.value_dim);
  }
  return cuda::loader_of(unbiased) == cuda::Loader::plain;
}

/// ALiBi needs consecutive rows in a tile, and biases at equal steps.
bool are_biases_straight(const AttendParams& params) {
  const bool rows_follow = params.queries.ranks == 1 ||
                           params.queries.layout == Layout::contiguous ||
                           params.queries.layout == Layout::ranges;
  return !params.bias.slopes || (rows_follow && params.bias.alibi != Alibi::sqrt);
}

}  // namespace

bool takes_16_bits(const AttendParams& params) {
  return !params.fp8_products && has_instance(params, cuda::Family::hopper) &&
         is_one_pass(params) && are_biases_straight(params) && are_rows_plain(params);
}

bool takes_e4m3(const AttendParams& params) {
  const auto aligned = [](const auto& rows) { return cuda::is_aligned<16>(rows, DType::e4m3); };
  return params.fp8_products && has_square_instance(params, cuda::Family::hopper_e4m3) &&
         is_one_pass(params) && params.q_dtype == DType::e4m3 && params.kv_dtype == DType::e4m3 &&
         params.head_dim % 16 == 0 && params.score.softcap == 0.0f && !params.bias &&
         !params.pages && !params.resume && params.k.dense() && params.v.dense() &&
         aligned(params.q) && aligned(params.k) && aligned(params.v);
}

bool takes_in_order(const AttendParams& params) {
  // The other kernels give other bits, so the decision must be the same on all ranks. It depends on
  // options of the layer, and on which arrays are given, but never on their addresses, or on the
  // number of a rank's keys.
  const bool scaled = params.q_scale || params.k_scale || params.v_scale;
  return params.invariant && has_square_instance(params, cuda::Family::hopper_in_order) &&
         params.q_dtype == params.dtype && params.kv_dtype == params.dtype &&
         params.shard.layout != Layout::listed && params.score.softcap == 0.0f &&
         params.score.scale > 0 && !params.bias && !scaled && !params.parts;
}

bool takes_gradients(const GradientParams& params) {
  const bool alike = params.q_dtype == params.dtype && params.kv_dtype == params.dtype &&
                     params.dout_dtype == params.dtype;
  const auto fits = [](int dim) { return dim % 8 == 0 && dim > 0 && dim <= kWidestGradients; };
  const auto aligned = [&](const auto& rows) {  // as TMA needs it
    return cuda::is_aligned<8>(rows, params.dtype) && rows.row_stride > 0 && rows.head_stride > 0;
  };
  GradientParams beside = params;  // dout has a map of its own, with the rows of q
  beside.q = params.dout;
  const bool plain = !params.bias.qq && are_biases_straight(params) &&
                     params.biases.slopes == nullptr && !params.pages &&
                     !params.batch.skip_decode && params.tokens > 0 && params.batch.size > 0;
  const bool simple = params.dtype == DType::bf16 && params.score.softcap == 0.0f && !params.bias &&
                      !params.dropout;
  return (params.dtype == DType::bf16 || params.dtype == DType::fp16) && alike &&
         (simple || std::max(params.head_dim, params.value_dim) <= kWidestScored) &&
         fits(params.head_dim) && fits(params.value_dim) &&
         std::max(params.head_dim, params.value_dim) >= kLeastGradients && plain &&
         is_one_pass(params) && fits_query_map(beside) &&
         params.dout.gap.rows == params.q.gap.rows && params.k.dense() && params.v.dense() &&
         aligned(params.q) && aligned(params.dout) && aligned(params.k) && aligned(params.v);
}

bool stores_gradients(const GradientParams& params) {
  const auto aligned = [](const TokenRows& rows) {
    return rows.data != nullptr && cuda::is_aligned<4>(rows, DType::bf16);
  };
  const GradientStores& to = params.stores;
  const bool all = params.dq.data != nullptr && params.dk.data != nullptr;
  return takes_gradients(params) && all && !params.resume_rows && !params.resume_keys &&
         aligned(to.dq) && aligned(to.dk) && aligned(to.dv);
}

bool takes_arrivals(const AttendParams& params, bool (*takes)(const AttendParams&)) {
  AttendParams own = params;  // the requirements on the others' keys apply to the own ones too
  own.k = params.arrivals->k;
  own.v = params.arrivals->v;
  return params.batch.size == 1 && params.batch.query_start == nullptr && !params.pages &&
         !params.resume && params.new_k.data == nullptr && takes(own);
}

int depth_in_order(const AttendParams& params) { return cuda::fold_depth(cuda::most_keys(params)); }

std::size_t scratch_bytes(const AttendParams& params, int multiprocessors) {
  if (!params.invariant) return kScratchBytes;
  const cuda::Instance& instance = *cuda::instance_of(
      cuda::Family::hopper_in_order, cuda::Loader::any16, params.head_dim, params.value_dim, 1);
  // As many blocks as any call with this many tokens and sequences has.
  const std::int64_t tiles = (params.tokens / instance.rows + params.batch.size) * params.heads;
  const auto blocks = static_cast<std::size_t>(std::min<std::int64_t>(tiles, multiprocessors));
  const std::size_t state = state_bytes_in_order(instance.dim, instance.rows);
  return kCounterBytes + state * blocks * static_cast<std::size_t>(depth_in_order(params));
}

}  // namespace longspan::kernels::sm90
