// Checks the arguments of a backward. Those of its run are checked as for the run.
#include <fmt/format.h>

#include <iterator>
#include <utility>

#include "longspan/attention.hpp"
#include "longspan/error.hpp"
#include "src/arguments/validate.hpp"

namespace longspan {
namespace {

/// Throws InputError unless a gradient is fp32 or of the type of its tensor.
void check_type(const Tensor& gradient, const char* name, DType of_tensor, const char* tensor) {
  if (of_tensor == DType::fp64)
    return require(gradient.dtype == of_tensor, "{} is {}; the gradient of {} is fp64, as it is",
                   name, longspan::name(gradient.dtype), tensor);
  require(gradient.dtype == fp32 || gradient.dtype == of_tensor,
          "{} is {}; the gradient of {} is {} or fp32", name, longspan::name(gradient.dtype),
          tensor, longspan::name(of_tensor));
}

/// Checks dk or dv: the shape of its tensor, at any strides of rows and heads.
void check_key_gradient(const Tensor& gradient, const char* name, const Tensor& of,
                        const char* tensor, Device device) {
  check_type(gradient, name, of.dtype, tensor);
  check_tensor(gradient, name, gradient.dtype, device);
  require(gradient.dims == of.dims && gradient.shape == of.shape, "{} is {}; {} is {}", name,
          shape_text(gradient), tensor, shape_text(of));
  require(gradient.size() == 0 || gradient.stride[gradient.dims - 1] == 1,
          "{} has a stride of {} in its last dimension, which must be dense", name,
          gradient.stride[gradient.dims - 1]);
  check_written(gradient, name);
}

/// A gradient of sinks or biases, and what it is of.
struct TermGradient {
  const Tensor& gradient;
  const char* name;
  const Tensor& of;
  const char* term;
};

/// Checks it: the shape of its term, at any stride of rows.
void check_term_gradient(const TermGradient& g, DType products, Device device) {
  const auto& [gradient, name, of, term] = g;
  if (products == DType::fp64)
    throw Unsupported(
        fmt::format("gradients of {} ({}) with products of fp64 are not supported", term, name));
  require(static_cast<bool>(of), "{} is given, and the run has no {}", name, term);
  if (gradient.dtype != fp32) check_product_dtype(of.dtype, term);
  check_type(gradient, name, of.dtype, term);
  check_tensor(gradient, name, gradient.dtype, device);
  require(gradient.dims == of.dims && gradient.shape == of.shape, "{} is {}; {} is {}", name,
          shape_text(gradient), term, shape_text(of));
  const int last = gradient.dims - 1;
  require(gradient.stride[last] == 1 || gradient.shape[last] <= 1,
          "{} has a stride of {} in its last dimension, which must be dense", name,
          gradient.stride[last]);
  check_written(gradient, name);
}

/// Checks that dk can be turned back: every key has an angle. Lengths that lie on a GPU are not
/// read: as in forward, an angle that the tables lack is NaN there.
void check_angles_of_keys(const AttentionArgs& run, const Options& options, const RunArrays& arrays,
                          Device device) {
  require(options.rope.dim > 0,
          "dk_before_rope is set, and the layer has no RoPE (rope.dim): leave it out");
  if (!run.rope_cos || (device != Device::host && arrays.kv_len != nullptr)) return;
  for (int b = 0; b < arrays.batch; ++b) {
    const std::int64_t keys = arrays.kv_len != nullptr ? arrays.kv_len[b] : run.total_keys;
    require(keys <= arrays.rope.positions,
            "dk_before_rope: sequence {} has {} keys, and rope_cos and rope_sin have {} positions",
            b, keys, arrays.rope.positions);
  }
}

void refuse_runs_without_gradients(const AttentionArgs& run) {
  const auto refuse = [](const char* what) {
    throw Unsupported(fmt::format("gradients of {} are not supported", what));
  };
  if (run.block_table) refuse("keys in pages (block_table)");
  if (run.new_k || run.new_v) refuse("a run that appends to its cache (new_k, new_v)");
  if (run.skip_decode) refuse("a run that leaves out sequences (skip_decode)");
  if (run.q_scale || run.k_scale || run.v_scale || run.out_scale)
    refuse("quantised tensors (q_scale, k_scale, v_scale, out_scale)");
}

}  // namespace

GradientArgs with_batch_rows(const GradientArgs& args) {
  GradientArgs flat = args;
  flat.run = with_batch_rows(args.run);
  flat.dout = batch_rows(args.dout, "dout");
  flat.dlse = batch_rows(args.dlse, "dlse");
  flat.dq = batch_rows(args.dq, "dq");
  return flat;
}

Checked check_gradients(const GradientArgs& args, const Options& options,
                        const Communicator& world) {
  if (!options.gradients)
    throw UsageError(
        "backward was called on a layer without gradients; set Options::gradients when it is made");
  if (options.invariant && world.size() > 1 && (args.dslopes || args.dqq_bias))
    throw Unsupported(
        "gradients of slopes and qq_bias (dslopes, dqq_bias) with invariant on several ranks are "
        "not supported: they add up in an order of the ranks; leave one of them off");
  const AttentionArgs& run = args.run;
  const Device device = world.device();
  refuse_runs_without_gradients(run);
  require(run.lse || count_rows(run.q) == 0,
          "backward needs the lse that the run wrote; the run has none");
  require(
      options.dropout.p == 0 || run.dropout_seed,
      "backward with dropout needs the dropout_seed of its run: the one that the run was given, "
      "or the layer's own (Attention::dropout_seed)");
  const Checked checked = check_attention(run, options, world);

  if (args.dk_before_rope) check_angles_of_keys(run, options, checked.arrays, device);

  const std::int64_t rows = count_rows(run.q);
  const DType compute = options.dtypes.compute;
  if (compute == DType::fp64)
    require(args.dout.dtype == compute, "dout is {}; the gradient of an out of fp64 is fp64",
            name(args.dout.dtype));
  else
    check_product_dtype(args.dout.dtype, "dout");
  check_batch_rows(args.dout, "dout", rows, options.heads, options.of_values(), args.dout.dtype,
                   device);
  if (args.dlse)
    check_batch_lse(args.dlse, "dlse", rows, options.heads, device, options.dtypes.of_lse());
  check_type(args.dq, "dq", run.q.dtype, "q");
  check_batch_rows(args.dq, "dq", rows, options.heads, options.head_dim, args.dq.dtype, device);
  check_written(args.dq, "dq");
  check_apart({&run.q, &args.dout, &args.dq}, {&run.lse, &args.dlse});
  check_key_gradient(args.dk, "dk", run.k, "k", device);
  const bool has_keys = run.k.size() > 0;  // tensors without any may have one address
  const bool in_keys = has_keys && values_in_keys(run.k, run.v);
  require(!in_keys || !args.dv,
          "dv is given, but v is the first columns of k, whose gradient dk holds that of v too: "
          "leave dv out");
  if (args.dv || (has_keys && !in_keys)) check_key_gradient(args.dv, "dv", run.v, "v", device);

  for (const TermGradient& term : {TermGradient{args.dsinks, "dsinks", run.sinks, "sinks"},
                                   {args.dslopes, "dslopes", run.slopes, "slopes"},
                                   {args.dqq_bias, "dqq_bias", run.qq_bias, "qq_bias"}})
    if (term.gradient) check_term_gradient(term, compute, device);
  require(!args.dqq_bias || args.dqq_bias.shape[0] <= options.limits.max_qq_gradient,
          "dqq_bias is {}; the layer was made for gradients of widths up to {} (max_qq_gradient)",
          shape_text(args.dqq_bias), options.limits.max_qq_gradient);

  const std::pair<const Tensor*, const char*> written[] = {
      {&args.dq, "dq"},         {&args.dk, "dk"},           {&args.dv, "dv"},
      {&args.dsinks, "dsinks"}, {&args.dslopes, "dslopes"}, {&args.dqq_bias, "dqq_bias"}};
  for (const auto& [to, name] : written) {
    for (const auto& [in, in_name] :
         {std::pair{&run.q, "q"}, std::pair{&run.k, "k"}, std::pair{&run.v, "v"},
          std::pair{&run.out, "out"}, std::pair{&run.lse.tensor, "lse"},
          std::pair{&args.dout, "dout"}, std::pair{&args.dlse.tensor, "dlse"},
          std::pair{&run.sinks, "sinks"}, std::pair{&run.slopes, "slopes"},
          std::pair{&run.qq_bias, "qq_bias"}})
      if (*to && *in) check_overlap(*to, name, *in, in_name);
  }
  for (const auto* a = std::begin(written); a != std::end(written); ++a)
    for (const auto* b = std::begin(written); b != a; ++b)
      if (*a->first && *b->first) check_overlap(*b->first, b->second, *a->first, a->second);
  return checked;
}

}  // namespace longspan
