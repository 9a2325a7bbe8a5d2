// Checks states and segments that calls write for the caller and read again.
#include "src/arguments/check_state.hpp"

#include "kernels/features.hpp"
#include "longspan/limits.hpp"
#include "src/arguments/array_checks.hpp"
#include "src/arguments/check_results.hpp"
#include "src/arguments/check_serving.hpp"

namespace longspan {
namespace {

/// The batch of rows by query_start, or of all rows.
kernels::Batch batch_of_rows(const Tensor& query_start, std::int64_t tokens, Device device) {
  kernels::Batch batch;
  if (!query_start) return batch;
  batch.query_start = array_of<std::int32_t>(query_start, "query_start", -1, device);
  require(query_start.shape[0] >= 2 && query_start.shape[0] - 1 <= kMostCount,
          "query_start is {}; [batch + 1] of 1 to 2^31 - 1 sequences is wanted",
          shape_text(query_start));
  batch.size = static_cast<int>(query_start.shape[0] - 1);
  if (device == Device::host) check_starts(batch, tokens);
  return batch;
}

}  // namespace

Tensor bytes_of(const AttentionState& state, Device device) {
  return {state.data, DType::uint8, {static_cast<std::int64_t>(state.bytes)}, device};
}

void check_state(const AttentionState& state, std::int64_t tokens, std::int64_t heads,
                 std::int64_t value_dim) {
  const std::size_t needed = check_state_size(tokens, heads, value_dim);
  require(state.bytes >= needed && (state.data != nullptr || needed == 0),
          "state has {} bytes; the states of [{}, {}] rows with a value_dim of {} take {} "
          "(state_bytes)",
          state.data == nullptr ? 0 : state.bytes, tokens, heads, value_dim, needed);
  require(state.bytes < std::size_t{1} << 62, "state has {} bytes, more than there are",
          state.bytes);
  require(reinterpret_cast<std::uintptr_t>(state.data) % 256 == 0,
          "state lies at {}; it must be aligned to 256 bytes", state.data);
}

std::size_t check_state_size(std::int64_t tokens, std::int64_t heads, std::int64_t value_dim) {
  require(tokens >= 0 && tokens <= kMostCount && heads >= 1 && heads <= kMostCount,
          "states of [{}, {}] rows were asked for; there are 0 to 2^31 - 1 tokens and 1 to "
          "2^31 - 1 heads",
          tokens, heads);
  kernels::check_head_dims(1, value_dim);
  const double bytes = static_cast<double>(tokens) * static_cast<double>(heads) *
                       (4.0 * static_cast<double>(value_dim) + 8);
  require(bytes < 0x1p48, "states of [{}, {}] rows take {:.3g} bytes; give less in one call",
          tokens, heads, bytes);
  return static_cast<std::size_t>(
      kernels::StateSlots::bytes(tokens * heads, static_cast<int>(value_dim)));
}

void check_handed_out(const SegmentedAttention& args, const PagedShape& shape, Device device) {
  require(!args.skip_decode,
          "skip_decode is given with segments, of which it would leave some unwritten; hand out "
          "those of all sequences");
  check_segments(args.segments, shape.tokens, shape.heads, shape.value_dim, device);
}

void check_segments(const Segments& s, std::int64_t tokens, std::int64_t heads,
                    std::int64_t least_dim, Device device) {
  check_tensor(s.output, "segments.output", DType::fp32, device);
  require(s.output.dims == 4 && s.output.shape[0] == tokens && s.output.shape[1] == heads &&
              s.output.shape[2] >= 1 && s.output.shape[2] <= kMostCount &&
              s.output.shape[3] >= least_dim,
          "segments.output is {}; [{}, {}, segments, at least {}] is wanted", shape_text(s.output),
          tokens, heads, least_dim);
  const std::int64_t count = s.output.shape[2], padded = s.output.stride[2];
  require(s.output.size() == 0 || (s.output.stride[3] == 1 && padded >= s.output.shape[3] &&
                                   padded <= kMostCount && s.output.stride[1] == count * padded &&
                                   s.output.stride[0] == heads * count * padded),
          "segments.output {} has strides {}, {}, {}, {}: its rows lie one behind the other",
          shape_text(s.output), s.output.stride[0], s.output.stride[1], s.output.stride[2],
          s.output.stride[3]);
  for (const auto& [t, name] :
       {std::pair{&s.max, "segments.max"}, std::pair{&s.expsum, "segments.expsum"}}) {
    check_tensor(*t, name, DType::fp32, device);
    require(t->dims == 3 && t->shape[0] == tokens && t->shape[1] == heads && t->shape[2] == count,
            "{} is {}; [{}, {}, {}] is wanted", name, shape_text(*t), tokens, heads, count);
    require(t->size() == 0 ||
                (t->stride[2] == 1 && t->stride[1] == count && t->stride[0] == heads * count),
            "{} {} has strides {}, {}, {}; it must be dense", name, shape_text(*t), t->stride[0],
            t->stride[1], t->stride[2]);
  }
  require(s.keys >= 0, "segments have {} keys; 0 means as many tiles as fill them", s.keys);
  require(s.keys <= kMostCount, "segments have {} keys; at most 2^31 - 1 are possible", s.keys);
  check_overlap(s.max, "segments.max", s.output, "segments.output");
  check_overlap(s.expsum, "segments.expsum", s.output, "segments.output");
  check_overlap(s.expsum, "segments.expsum", s.max, "segments.max");
  require(s.tile >= 1, "a tile has {} keys; it has at least 1", s.tile);
}

kernels::Batch check_reduce(const ReduceSegments& args, Device device) {
  require(bool{args.kv_len}, "kv_len is missing: the length of each sequence, new tokens included");
  kernels::Batch batch;
  batch.size = batch_of(args.kv_len);
  require(batch.size == 1 || args.query_start, "a batch of {} sequences needs query_start",
          batch.size);
  batch.query_start =
      array_of<std::int32_t>(args.query_start, "query_start", std::int64_t{batch.size} + 1, device);
  batch.kv_len = array_of<std::int32_t>(args.kv_len, "kv_len", batch.size, device);
  require(args.out.dims == 3, "out is {}; [tokens, heads, value_dim] is wanted",
          shape_text(args.out));
  const std::int64_t tokens = args.out.shape[0], heads = args.out.shape[1], dim = args.out.shape[2];
  check_part({args.out, "out", args.out_scale, "out_scale", true}, device);
  check_counts(args.out, "out", 1);
  check_rows(args.out, "out", -1, heads, dim, args.out.dtype, device);
  if (args.lse) check_lse(args.lse.tensor, "lse", tokens, heads, device);
  check_segments(args.segments, tokens, heads, dim, device);
  check_memory({{args.out, "out"}, {args.lse.tensor, "lse"}},
               {{args.segments.output, "segments.output"},
                {args.segments.max, "segments.max"},
                {args.segments.expsum, "segments.expsum"}});
  return batch;
}

kernels::Batch check_finish(const FinishState& args, Device device) {
  const Tensor& out = args.out;
  require(out.dims == 3 || out.dims == 4,
          "out is {}; [tokens, heads, value_dim] is wanted, or [batch, heads, tokens, value_dim]",
          shape_text(out));
  const std::int64_t tokens = count_rows(out), heads = out.shape[out.dims - 2];
  const std::int64_t dim = out.shape[out.dims - 1];
  check_part({out, "out", args.out_scale, "out_scale", true}, device);
  check_counts(out, "out", out.dims - 2);
  check_batch_rows(out, "out", -1, heads, dim, out.dtype, device);
  check_state(args.state, tokens, heads, dim);
  if (args.lse) check_batch_lse(args.lse, "lse", tokens, heads, device);
  check_apart({&out}, {&args.lse});
  check_memory({{out, "out"}, {args.lse.tensor, "lse"}}, {{bytes_of(args.state, device), "state"}});
  return batch_of_rows(args.query_start, tokens, device);
}

kernels::Batch check_export(const ExportState& args, std::int64_t value_dim, Device device) {
  const Tensor& output = args.output;
  require(output.dims == 4 && output.shape[2] == 1,
          "output is {}; [tokens, heads, 1, at least value_dim] is wanted", shape_text(output));
  check_counts(output, "output", 1);
  check_state(args.state, output.shape[0], output.shape[1], value_dim);
  check_segments({output, args.max, args.expsum}, output.shape[0], output.shape[1], value_dim,
                 device);
  check_memory({{output, "output"}, {args.max, "max"}, {args.expsum, "expsum"}},
               {{bytes_of(args.state, device), "state"}});
  return batch_of_rows(args.query_start, output.shape[0], device);
}

}  // namespace longspan
