// Checks merges of finished results, on one rank and across ranks.
#include "longspan/storage.hpp"
#include "src/arguments/check_results.hpp"
#include "src/arguments/check_serving.hpp"

namespace longspan {

void check_merge(const MergeAttnStates& args, Device device) {
  const Tensor &prefix = args.prefix_out, &suffix = args.suffix_out;
  require(prefix.dims == 3, "prefix_out is {}; [tokens, heads, value_dim] is wanted",
          shape_text(prefix));
  const std::int64_t tokens = prefix.shape[0], heads = prefix.shape[1], dim = prefix.shape[2];
  check_counts(prefix, "prefix_out", 1);
  for (const PartSpec& part : {PartSpec{prefix, "prefix_out", args.prefix_scale, "prefix_scale"},
                               PartSpec{suffix, "suffix_out", args.suffix_scale, "suffix_scale"},
                               PartSpec{args.out, "out", args.out_scale, "out_scale", true}}) {
    check_part(part, device);
    check_rows(part.tensor, part.name, tokens, heads, dim, part.tensor.dtype, device);
  }
  const Tensor &prefix_lse = args.prefix_lse.tensor, &suffix_lse = args.suffix_lse.tensor;
  check_lse(prefix_lse, "prefix_lse", tokens, heads, device);
  check_lse(suffix_lse, "suffix_lse", tokens, heads, device);
  if (args.out_lse) check_lse(args.out_lse.tensor, "out_lse", tokens, heads, device);
  require(args.prefill_tokens_with_context.value_or(0) >= 0,
          "prefill_tokens_with_context is {}; it is a number of tokens",
          args.prefill_tokens_with_context.value_or(0));
  check_memory({{args.out, "out", {&prefix, &suffix}},
                {args.out_lse.tensor, "out_lse", {&prefix_lse, &suffix_lse}}},
               {{prefix, "prefix_out"},
                {suffix, "suffix_out"},
                {prefix_lse, "prefix_lse"},
                {suffix_lse, "suffix_lse"}});
}

void check_merge(const MergeStates& args, Device device) {
  const Tensor &in = args.parts, &lses = args.lses.tensor;

  require(in.dims == 4 && in.shape[0] >= 1 && in.shape[0] <= kMostCount,
          "parts is {}; [parts, tokens, heads, dim] of at least one part is wanted",
          shape_text(in));
  const std::int64_t parts = in.shape[0], tokens = in.shape[1], heads = in.shape[2];
  check_part({in, "parts", args.part_scales, "part_scales"}, device, parts);
  check_tensor(in, "parts", in.dtype, device);
  check_counts(in, "parts", 2);
  require(in.stride[3] == 1 || in.size() == 0,
          "parts has stride {} in its last dimension; it must be 1", in.stride[3]);
  check_part({args.out, "out", args.out_scale, "out_scale", true}, device);
  check_rows(args.out, "out", tokens, heads, in.shape[3], args.out.dtype, device);
  check_tensor(lses, "lses", DType::fp32, device);
  require(
      lses.dims == 3 && lses.shape[0] == parts && lses.shape[1] == tokens && lses.shape[2] == heads,
      "lses is {} (parts, tokens, heads); [{}, {}, {}] is wanted", shape_text(lses), parts, tokens,
      heads);
  if (args.out_lse) check_lse(args.out_lse.tensor, "out_lse", tokens, heads, device);
  check_memory({{args.out, "out"}, {args.out_lse.tensor, "out_lse"}},
               {{in, "parts"}, {lses, "lses"}});
}

void check_merge(const MergeArgs& args, const MergeOptions& options, int ranks, Device device) {
  const Tensor &part = args.part, &out = args.out, &part_lse = args.part_lse.tensor;
  const bool whole = !options.scatter_heads;
  const std::int64_t heads = whole ? options.heads : options.heads / ranks;
  check_batch_rows(part, "part", -1, options.heads, options.value_dim, options.dtype, device);
  const std::int64_t tokens = count_rows(part);
  require(tokens <= options.max_tokens,
          "part has {} tokens; the merge was made for at most {} (max_tokens)", tokens,
          options.max_tokens);
  check_apart({&part, &out}, {&args.part_lse, &args.lse});
  check_part({part, "part", args.part_scale, "part_scale"}, device);
  require(storage_of(part.dtype).needs_scale || !args.part_scale,
          "part_scale is given and part is {}; parts of fp8 have one", name(part.dtype));
  check_batch_lse(args.part_lse, "part_lse", tokens, options.heads, device);
  check_batch_rows(out, "out", tokens, heads, options.value_dim, options.of_out(), device);
  check_part({out, "out", args.out_scale, "out_scale", true}, device);
  if (args.lse) check_batch_lse(args.lse, "lse", tokens, heads, device);
  check_memory({{out, "out", {whole ? &part : nullptr}},
                {args.lse.tensor, "lse", {whole ? &part_lse : nullptr}}},
               {{part, "part"}, {part_lse, "part_lse"}});
}

}  // namespace longspan
