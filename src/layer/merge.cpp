// The merge across ranks: each rank packs its part into the send buffer, receives the parts of all
// ranks (or those of its own heads), and one kernel merges them.
//
//     whole       my slot         -> all_gather -> [ranks] slots -> merge of all heads
//     scattered   [ranks] slots   -> all_to_all -> [ranks] slots -> merge of my heads
#include "longspan/merge.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "comm/transport.hpp"
#include "kernels/backend.hpp"
#include "longspan/error.hpp"
#include "src/agreement/agreed_runs.hpp"
#include "src/agreement/agreement.hpp"
#include "src/arguments/check_serving.hpp"
#include "src/arguments/tensor_checks.hpp"
#include "src/arguments/validate.hpp"
#include "src/base/device_guard.hpp"
#include "src/base/trace.hpp"
#include "src/layer/layer_memory.hpp"

namespace longspan {
namespace {

constexpr const char* kStep = "merge across ranks";

/// Throws UsageError for options that make no sense, or sizes that no memory can hold.
void check_options(const MergeOptions& o, LogBase base, int ranks) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  usage(o.heads >= 1, fmt::format("heads {} is below 1", o.heads));
  usage(o.value_dim >= 1, fmt::format("value_dim {} is below 1", o.value_dim));
  usage(o.max_tokens >= 0 && o.max_tokens <= kMost,
        fmt::format("max_tokens {} is not in 0 to 2^31 - 1", o.max_tokens));
  for (const auto& [dtype, what] :
       {std::pair{o.dtype, "dtype"}, std::pair{o.of_out(), "out_dtype"}})
    usage(is_float(dtype),
          fmt::format("{} is {}; fp32, fp16, bf16 or fp8 is wanted", what, name(dtype)));
  usage(base == LogBase::e || base == LogBase::two,
        fmt::format("base of number {} is not one of e, two", static_cast<int>(base)));
  usage(!o.scatter_heads || o.heads % ranks == 0,
        fmt::format("scatter_heads: {} heads cannot be dealt out to {} ranks, which must divide "
                    "them",
                    o.heads, ranks));
  check_threads(o.threads);
  const double bytes =
      static_cast<double>(o.max_tokens) * o.heads * (4.0 * o.value_dim + 4) * ranks;
  usage(bytes < 0x1p48,
        fmt::format("max_tokens {} with heads {} and value_dim {} on {} ranks: the parts of such a "
                    "run take up to {:.3g} bytes; give the most tokens of one run",
                    o.max_tokens, o.heads, o.value_dim, ranks, bytes));
}

/// A slot holds some heads of a rank's part with their lse, as they travel. The whole part is
/// stored as [tokens, heads, value_dim], then its lse [tokens, heads]. Scattered heads each have
/// their own [tokens, value_dim] and lse [tokens], so that the heads of one rank are contiguous.
struct Slot {
  std::int64_t row_stride, head_stride;          // of elements
  std::int64_t lse_row_stride, lse_head_stride;  // of floats
  std::int64_t lse_at;                           // bytes before the first lse
  std::int64_t bytes;  // more than 0, since an empty exchange is an exchange too

  Slot(const MergeOptions& o, std::int64_t tokens, int ranks) {
    const std::int64_t heads = o.heads, dim = o.value_dim;
    const auto size = static_cast<std::int64_t>(size_of(o.dtype));
    const std::int64_t together = o.scatter_heads ? 1 : heads;  // adjacent heads in a row
    lse_at = align(tokens * together * dim * size);
    const std::int64_t block = lse_at + align(tokens * together * 4);
    row_stride = together * dim;
    head_stride = o.scatter_heads ? block / size : dim;
    lse_row_stride = together;
    lse_head_stride = o.scatter_heads ? block / 4 : 1;
    bytes = std::max<std::int64_t>(o.scatter_heads ? block * (heads / ranks) : block, 16);
  }

  kernels::Rows rows(std::byte* at) const { return {at, row_stride, head_stride}; }
  kernels::LseView lse(std::byte* at) const {
    return {reinterpret_cast<float*>(at + lse_at), lse_row_stride, lse_head_stride};
  }

 private:
  /// Aligns to 16 bytes, which the kernels read at once.
  static std::int64_t align(std::int64_t bytes) { return (bytes + 15) / 16 * 16; }
};

/// Rows of memory from `first` on, with equal steps within their sequence.
kernels::Rows rows_from(const kernels::TokenRows& rows, DType dtype, std::int64_t first) {
  kernels::Rows tail = rows;
  tail.data = static_cast<std::byte*>(rows.data) +
              rows.offset(first, 0) * static_cast<std::int64_t>(size_of(dtype));
  return tail;
}
kernels::LseView lse_from(const kernels::TokenLse& lse, std::int64_t first) {
  kernels::LseView tail = lse;
  if (lse.data != nullptr) tail.data = lse.at(first, 0);
  return tail;
}

}  // namespace

struct CrossRankMerge::Impl {
  Communicator world;
  MergeOptions options;
  LogBase base;
  std::unique_ptr<kernels::Backend> kernels;
  LayerMemory memory;
  std::optional<AgreedRuns> runs;
  // With several ranks only:
  std::byte* slots = nullptr;    // [ranks] as received
  std::byte* leaving = nullptr;  // scattered: [ranks] as sent; whole: the rank's own of `slots`
  float* scales = nullptr;       // [ranks] for parts of fp8

  Impl(const Communicator& communicator, const MergeOptions& given, LogBase log_base)
      : world(communicator), options(given), base(log_base), memory(world) {
    const DeviceGuard guard(world.gpu());
    runs.emplace(world, kStep, describe(options, base));
    check_options(options, base, world.size());
    kernels = make_kernels(world, options.threads);
    kernels->merge_outputs(merge_params(0), {});  // no tokens: throws for too many ranks
    memory.allocate([this](Parts& parts) { lay_out(parts); },
                    [this] { runs->allocate(*kernels, world.device() == Device::host); });
  }

  int ranks() const { return world.size(); }
  bool has_scales() const { return storage_of(options.dtype).needs_scale; }

  void lay_out(Parts& parts) {
    if (ranks() == 1) return;
    const auto all = static_cast<std::size_t>(ranks()) *
                     static_cast<std::size_t>(Slot(options, options.max_tokens, ranks()).bytes);
    slots = parts.take(all);
    leaving = options.scatter_heads ? parts.take(all) : nullptr;
    if (has_scales()) scales = parts.take_array<float>(static_cast<std::size_t>(ranks()));
    runs->lay_out(parts);
  }

  /// Describes the merge of `tokens`, without addresses.
  kernels::MergeOutputsParams merge_params(std::int64_t tokens) const {
    kernels::MergeOutputsParams p;
    p.parts = ranks();
    p.in_dtype[0] = p.in_dtype[1] = options.dtype;
    p.base = base;
    p.nan_is_empty = options.nan_is_empty;
    p.tokens = tokens;
    p.heads = options.scatter_heads ? options.heads / ranks() : options.heads;
    p.dim = options.value_dim;
    p.dtype = options.of_out();
    return p;
  }

  /// Merges into the result, in one call, or in one for each sequence if they lie apart: kernels
  /// take rows with equal steps, which is cheapest for them. give_parts(params, first) sets the
  /// location of the parts from token `first` on.
  template <class GiveParts>
  void merge(const MergeArgs& args, const kernels::RunHeaders& headers, Stream stream,
             const GiveParts& give_parts) const {
    const std::int64_t tokens = count_rows(args.part);
    const kernels::TokenRows out = token_rows_of(args.out), part = token_rows_of(args.part);
    const kernels::TokenLse lse = token_lse_of(args.lse), part_lse = token_lse_of(args.part_lse);
    const std::int64_t apart =
        std::max({out.gap.rows, lse.gap.rows, part.gap.rows, part_lse.gap.rows});
    const std::int64_t step = apart > 0 ? apart : std::max<std::int64_t>(tokens, 1);
    for (std::int64_t first = 0; first == 0 || first < tokens; first += step) {
      kernels::MergeOutputsParams p = merge_params(std::min(step, tokens - first));
      give_parts(p, first);
      p.headers = headers;
      p.out = rows_from(out, options.of_out(), first);
      p.lse = lse_from(lse, first);
      p.out_scale = {static_cast<const float*>(args.out_scale.data)};
      kernels->merge_outputs(p, stream);
    }
  }

  /// Merges the one part of one rank.
  void finish(const MergeArgs& args, Stream stream) const {
    merge(args, {}, stream, [&](kernels::MergeOutputsParams& p, std::int64_t first) {
      p.in[0] = rows_from(token_rows_of(args.part), options.dtype, first);
      p.in_lse[0] = lse_from(token_lse_of(args.part_lse), first);
      p.in_scale[0] = static_cast<const float*>(args.part_scale.data);
    });
  }

  void pack(const MergeArgs& args, const Slot& slot, std::byte* to, Stream stream) const {
    kernels->pack_outputs({.tokens = count_rows(args.part),
                           .heads = options.heads,
                           .dim = options.value_dim,
                           .dtype = options.dtype,
                           .from = token_rows_of(args.part),
                           .to = slot.rows(to),
                           .from_lse = token_lse_of(args.part_lse),
                           .to_lse = slot.lse(to)},
                          stream);
  }

  /// Merges the received parts, each in its slot.
  void merge_slots(const MergeArgs& args, const Slot& slot, const kernels::RunHeaders& headers,
                   Stream stream) const {
    merge(args, headers, stream, [&](kernels::MergeOutputsParams& p, std::int64_t first) {
      p.part_stride = slot.bytes / static_cast<std::int64_t>(size_of(options.dtype));
      p.lse_part_stride = slot.bytes / 4;
      for (int part = 0; part < (ranks() == 2 ? 2 : 1); ++part) {
        std::byte* const at = slots + part * slot.bytes;
        p.in[part] = rows_from(slot.rows(at), options.dtype, first);
        p.in_lse[part] = lse_from(slot.lse(at), first);
        p.in_scale[part] = scales == nullptr ? nullptr : scales + part;
      }
    });
  }

  void run(const MergeArgs& args, Stream stream) {
    comm::Transport& comm = comm::transport_of(world);
    const Slot slot(options, count_rows(args.part), ranks());
    const auto bytes = static_cast<std::size_t>(slot.bytes);
    const int rank = world.rank();
    const AgreedRuns::Begun begun =
        runs->begin({args, options, world.device() == Device::host}, stream);
    kernels->write_run_digest(begun.own_digest, stream);
    std::byte* from = options.scatter_heads ? leaving : slots + rank * slot.bytes;
    pack(args, slot, from, stream);
    if (options.scatter_heads)
      comm.all_to_all(from, slots, bytes, stream, "exchange of results", begun.digests);
    else
      comm.all_gather(from, slots, bytes, stream, "gather of results", begun.digests);
    if (has_scales()) comm.all_gather(args.part_scale.data, scales, 4, stream, "gather of scales");
    merge_slots(args, slot, begun.headers, stream);
  }
};

CrossRankMerge::CrossRankMerge(const Communicator& world, const MergeOptions& options, LogBase base)
    : impl_(std::make_unique<Impl>(world, options, base)) {}
CrossRankMerge::~CrossRankMerge() = default;
CrossRankMerge::CrossRankMerge(CrossRankMerge&&) noexcept = default;
CrossRankMerge& CrossRankMerge::operator=(CrossRankMerge&&) noexcept = default;

void CrossRankMerge::run(const MergeArgs& given, Stream stream) {
  const trace::Range range("longspan merge across ranks");
  MergeArgs args = given;
  args.part = batch_rows(given.part, "part");
  args.part_lse = batch_rows(given.part_lse, "part_lse");
  args.out = batch_rows(given.out, "out");
  args.lse = batch_rows(given.lse, "lse");
  const DeviceGuard guard(impl_->world.gpu());
  impl_->runs->checked(
      [&] { check_merge(args, impl_->options, impl_->ranks(), impl_->world.device()); },
      [&] { return RunDescription(args); });
  impl_->runs->check();
  if (impl_->ranks() == 1) return impl_->finish(args, stream);
  impl_->run(args, stream);
}

void CrossRankMerge::wait(Stream stream) {
  const DeviceGuard guard(impl_->world.gpu());
  comm::transport_of(impl_->world).wait(stream, kStep);
  impl_->runs->check();
}

const MergeOptions& CrossRankMerge::options() const { return impl_->options; }
LogBase CrossRankMerge::base() const { return impl_->base; }
const Communicator& CrossRankMerge::world() const { return impl_->world; }
std::size_t CrossRankMerge::workspace_bytes() const { return impl_->memory.bytes(); }

}  // namespace longspan
