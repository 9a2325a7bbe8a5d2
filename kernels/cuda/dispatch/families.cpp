#include "kernels/cuda/dispatch/families.hpp"

#include <algorithm>
#include <string>

#include "kernels/cuda/common/access.hpp"
#include "kernels/cuda/hopper/attend_sm90.hpp"
#include "kernels/cuda/mla/mla_rules.hpp"
#include "longspan/error.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr Loader kLoaders[] = {Loader::plain, Loader::any16, Loader::any8};

using Takes = bool(const AttendParams&);

/// A family of Hopper, for long queries that `kTakes` accepts.
template <Takes* kTakes>
constexpr CudaFamily hopper(Family id, const char* heads, const char* takes) {
  return {
      .id = id,
      .words = {name(id), "long", heads, takes},
      .ends = Ends::itself,
      .accepts =
          [](const AttendParams& p, const Kind& kind) {
            return kind.lengths == Lengths::only_long && kind.gpu.hopper_code && !p.dropout &&
                   kTakes(p);
          },
      .needs = [](const AttendParams& p,
                  const Kind& kind) { return sm90::scratch_bytes(p, kind.gpu.multiprocessors); },
      .scratch =
          [](const AttendParams& limits, const Kind& kind) {
            AttendParams longest = limits;
            longest.shard.length = most_keys_within(limits);
            return Room{sm90::scratch_bytes(longest, kind.gpu.multiprocessors)};
          },
      .attend = attend_hopper,
      .finishes =
          [](const AttendParams& p, const MergeParams& m) {
            const bool can = ends_plainly(p, m) && !(p.invariant && p.resume);
            return can ? Ends::itself : Ends::in_states;
          }};
}

/// The same if keys may still be arriving.
template <Takes* kTakes>
constexpr CudaFamily hopper_by_arrivals(Family id, const char* heads, const char* takes) {
  CudaFamily family = hopper<kTakes>(id, heads, takes);
  family.takes_arrivals = [](const AttendParams& p) {
    return !p.dropout && sm90::takes_arrivals(p, kTakes);
  };
  return family;
}

/// A family whose launches share a plan, for calls that `kTakes` accepts and an instance fits.
template <Family kId, bool (*kTakes)(const AttendParams&, Lengths)>
constexpr CudaFamily planned(const char* queries, const char* heads, const char* takes) {
  return {.id = kId,
          .words = {name(kId), queries, heads, takes},
          .ends = Ends::by_fold,
          .accepts =
              [](const AttendParams& p, const Kind& kind) {
                return kTakes(p, kind.lengths) && instance_for(kId, p, kind) != nullptr;
              },
          .needs =
              [](const AttendParams& p, const Kind& kind) {
                const KernelLaunch launch = make_launch(kId, p, kind);
                return bytes_aside(p, launch) + launch.bytes;
              },
          .scratch = [](const AttendParams& limits,
                        const Kind& kind) { return room_of(kId, limits, kind); },
          .attend = [](const AttendParams& p, const Kind& kind, const MergeParams* result,
                       Stream stream) { return attend_planned(kId, p, kind, result, stream); },
          .finishes =
              [](const AttendParams& p, const MergeParams& m) {
                const bool compares = m.headers.digests != nullptr;  // as a merge does, but no fold
                return p.resume || p.parts || compares ? Ends::in_states : Ends::by_fold;
              }};
}

bool takes_decode(const AttendParams& p, Lengths lengths) {
  return lengths != Lengths::only_long && p.dtype != DType::fp32 && p.head_dim == p.value_dim &&
         !p.dropout && !is_latent_row(p.kv_dtype);
}
/// The heads of a kv head choose between the two families of latent keys, never the rest of a
/// batch.
bool takes_latent(const AttendParams& p, Lengths lengths) {
  return lengths != Lengths::only_long && takes_latent_keys(p) &&
         p.heads / p.kv_heads > kLatentRowsInOrder && !p.invariant;
}
bool takes_latent_in_order(const AttendParams& p, Lengths lengths) {
  return lengths != Lengths::only_long && takes_latent_keys(p) &&
         p.heads / p.kv_heads <= kLatentRowsInOrder;
}
bool takes_16_bits(const AttendParams& p, Lengths) {
  return p.dtype != DType::fp32 && !is_latent_row(p.kv_dtype);
}
bool takes_tf32(const AttendParams& p, Lengths) {
  return p.dtype == DType::fp32 && p.tf32 && !is_latent_row(p.kv_dtype);
}
bool takes_all(const AttendParams&, Lengths) { return true; }

constexpr CudaFamily decode() {
  CudaFamily family = planned<Family::decode, takes_decode>(
      "short", "equal, up to 256",
      "products of 16 bits; keys and values of that type or fp8; no dropout");
  // Each of these keys is seen by a row of its own sequence, so some work tile reads its segment.
  family.writes_new_keys = [](const AttendParams& p) {
    return p.queries.ranks == 1 && p.new_v.data != nullptr && loader_of(p) == Loader::plain &&
           !p.rope && !p.documents && !p.batch.hides() && p.shard.layout != Layout::listed &&
           is_aligned<8>(p.new_k, p.dtype) && is_aligned<8>(p.new_v, p.dtype);
  };
  return family;
}

/// A family of latent keys, for GPUs that run Hopper's code.
template <Family kId, bool (*kTakes)(const AttendParams&, Lengths)>
constexpr CudaFamily latent(const char* heads, const char* takes) {
  CudaFamily family = planned<kId, kTakes>("short", heads, takes);
  family.accepts = [](const AttendParams& p, const Kind& kind) {
    return kind.gpu.hopper_code && kTakes(p, kind.lengths) && instance_for(kId, p, kind) != nullptr;
  };
  return family;
}

constexpr CudaFamily hopper_e4m3() {
  CudaFamily family = hopper_by_arrivals<sm90::takes_e4m3>(
      Family::hopper_e4m3, "equal, 48 to 256 in steps of 16",
      "fp8_products: e4m3 queries, keys and values; no pages, softcap, ALiBi or qq_bias");
  family.check = [](const AttendParams& p, const Kind& kind) {
    if (p.fp8_products && !kind.gpu.hopper_code)
      throw Unsupported(
          "fp8_products: this GPU, or this build, has no kernel for it; it needs compute "
          "capability "
          "9.0 and a build with LONGSPAN_CUDA_ARCHITECTURES=90a. Leave it off to have e4m3 "
          "widened");
  };
  return family;
}

constexpr CudaFamily kFamilies[] = {
    hopper<sm90::takes_in_order>(
        Family::hopper_in_order, "equal, 48 to 128 in steps of 8",
        "invariant: 16 bits of one type, in pages and at any strides; no softcap, biases, "
        "scales or dropout"),
    hopper_e4m3(),
    hopper_by_arrivals<sm90::takes_16_bits>(
        Family::hopper, "keys of 48 to 256, values up to 256, in steps of 8",
        "16 bits of one type, a positive scale, pages for heads of 81 to 192; no qq_bias, ALiBi "
        "sqrt, scales of tensors or dropout"),
    decode(),
    latent<Family::mla_in_order, takes_latent_in_order>(
        "264 to 576",
        "values in the keys, up to 16 heads of a kv head: 16 bits of one type; no biases, scales "
        "of "
        "tensors or dropout"),
    latent<Family::mla, takes_latent>("264 to 576",
                                      "the same for more heads of a kv head; not invariant"),
    planned<Family::portable, takes_16_bits>(
        "any", "up to 256", "products of 16 bits; keys and values of that type or fp8"),
    planned<Family::tf32, takes_tf32>("any", "up to 256", "fp32 with tf32, in products of tf32"),
    planned<Family::fp32, takes_all>("any", "all", "elements of any type, in products of fp32"),
};

[[noreturn]] void refuse(const AttendParams& p, const Gpu& gpu) {
  throw Unsupported("head_dim " + std::to_string(p.head_dim) + " and value_dim " +
                    std::to_string(p.value_dim) + " in " + name(p.dtype) +
                    ": a thread block of this GPU may have " + std::to_string(gpu.block_bytes) +
                    " bytes of shared memory, and no kernel for these needs so few: use smaller "
                    "ones, another GPU, or device host");
}

}  // namespace

std::span<const CudaFamily> families() { return kFamilies; }

const CudaFamily& serving(const AttendParams& p, const Kind& kind) {
  const CudaFamily* family = first_that_accepts(families(), p, kind);
  if (family == nullptr) refuse(p, kind.gpu);
  return *family;
}

void check(const AttendParams& p, const Gpu& gpu) {
  for (const CudaFamily& family : families())
    if (family.check != nullptr) family.check(p, kind_of(p, Lengths::only_long, gpu));
  if (gpu.block_bytes >= kEnoughBytes || p.batch.size == 0) return;
  for (const Loader loader : kLoaders)
    for (const Lengths lengths : {Lengths::only_short, Lengths::only_long})
      serving(p, {lengths, loader, gpu});
}

std::size_t scratch_bytes(const AttendParams& p, const Gpu& gpu) {
  std::size_t bytes = 0;
  for (const Lengths lengths : kinds(p)) {
    if (!may_hold(p, lengths)) continue;
    const Kind kind = kind_of(p, lengths, gpu);
    bytes = std::max(bytes, serving(p, kind).needs(p, kind));
  }
  return bytes;
}

std::size_t scratch_bound(const AttendParams& limits, const Gpu& gpu) {
  Room most;
  const auto add = [&](const Kind& kind) {
    for (const CudaFamily& family : families()) {
      if (!family.accepts(limits, kind)) continue;
      const Room room = family.scratch(limits, kind);
      most.bytes = std::max(most.bytes, room.bytes);
      most.split_tokens = std::max(most.split_tokens, room.split_tokens);
      // These accept calls by the layout and the number of rows, so other families serve some calls
      // within the limits.
      if (!is_of_hopper(family.id) && !is_of_mla(family.id)) return;
    }
    refuse(limits, gpu);
  };
  for (const Loader loader : kLoaders) {  // as requests differ
    add({Lengths::only_short, loader, gpu});
    if (limits.tokens > kShortQuery) add({Lengths::only_long, loader, gpu});
  }
  if (!limits.resume) return most.bytes;
  // States set aside are those of tokens in sequences that are short or split. Among several
  // sequences they may be anywhere; a single one is short as a whole, or split as a whole.
  const std::int64_t least = limits.batch.size > 1 ? limits.tokens : kShortQuery;
  return most.bytes + room_aside(limits, std::max(least, most.split_tokens));
}

bool ends_plainly(const AttendParams& p, const MergeParams& m) {
  return m.dtype == p.dtype && m.out_scale.data == nullptr && is_aligned<8>(m.out, m.dtype);
}

}  // namespace longspan::kernels::cuda
