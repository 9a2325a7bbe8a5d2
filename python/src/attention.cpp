// attend(): it keeps its layers (plans.hpp).
#include "python/src/attention.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <tuple>
#include <utility>

#include "longspan/error.hpp"
#include "python/src/arrays.hpp"
#include "python/src/call.hpp"
#include "python/src/communicators.hpp"
#include "python/src/dtypes.hpp"
#include "python/src/errors.hpp"
#include "python/src/lengths.hpp"
#include "python/src/options.hpp"

namespace longspan::python {
namespace {

/// Options that attend() finds by itself: from its arrays, or as flash-attention has them. Others
/// keep their defaults.
constexpr NameList kFound{"heads",        "kv_heads",       "head_dim",  "value_dim",
                          "dtype",        "q_dtype",        "out_dtype", "tf32",
                          "fp8_products", "bf16_products",  "alibi",     "max_queries",
                          "max_batch",    "max_total_keys", "threads",   "check_arrays",
                          "profile",      "gradients",      "dout",      "max_qq_gradient",
                          "top_k"};

constexpr NameList kAttend = [] {
  NameList names = kRun;
  names.add("comm");
  add_options(names, [](const OptionInfo& option) { return !kFound.has(option.python); });
  return names;
}();

/// Those among its arguments that also have other values than the option: flags of sequences, None.
constexpr NameList kOtherValues{"causal", "max_seqlen_q", "max_seqlen_k", "kv_dtype"};

/// Options of attend() that need no other rank.
Options options_of(const AttendCall& call, const Arguments<kAttend>& given) {
  Options o;
  take(o.dtypes.kv, given.get<"kv_dtype">(), "kv_dtype");
  const DType rows = o.dtypes.of_kv();  // which carry their scales; or any other type
  call.check_types(rows);
  o.heads = small(call.heads(), "the number of heads of q");
  o.kv_heads = small(call.kv_heads(), "the number of heads of k");
  o.head_dim = small(call.head_dim(), "the last dimension of q");
  o.value_dim = is_latent_row(rows) ? row_format_of(rows).value_dim
                                    : small(call.value_dim(), "the last dimension of v");
  const Tensor &q = call.q.tensor(), &k = call.k.tensor();
  if (!is_fp8(q.dtype))
    o.dtypes.compute = q.dtype;
  else if (is_fp8(k.dtype) && is_fp8(call.v.tensor().dtype) && call.given_out &&
           !is_fp8(call.given_out.tensor().dtype))
    o.dtypes.compute = call.given_out.tensor().dtype;  // as nothing else says it
  if (o.dtypes.kv && !is_latent_row(rows) && *o.dtypes.kv != k.dtype)
    throw InputError(std::string("kv_dtype is ") + dtype_name(rows) + ", and k is " +
                     dtype_name(k.dtype) +
                     "; it is for rows that carry their scales, as latent656");
  for (const auto& [t, name] : {std::pair{&k, "k"}, {&call.v.tensor(), "v"}})
    if (!is_latent_row(rows) && !is_fp8(t->dtype) && t->dtype != o.dtypes.compute)
      throw InputError(
          std::string(name) + " is " + dtype_name(t->dtype) + "; " + dtype_name(o.dtypes.compute) +
          (o.dtypes.compute == DType::fp64 ? ", as q, is wanted" : ", as q, or fp8 is wanted"));
  call.given_out.floats();
  o.dtypes.query = q.dtype;
  if (!is_latent_row(rows)) o.dtypes.kv = k.dtype;
  o.dtypes.out = call.given_out ? call.given_out.tensor().dtype : o.dtypes.compute;
  o.mask.causal = given.get<"causal">().ptr() == Py_True;
  o.score.alibi = Alibi::query;  // as flash-attention has it
  take_options<kOtherValues>(o, given);
  const Tensor& indices = call.indices.tensor();
  if (call.indices && indices.dims > 0)
    o.indices.top_k = small(rounded_up(indices.shape[indices.dims - 1]), "the columns of indices");
  o.values_in_keys |= is_latent_row(rows);
  o.limits.max_kv_len = std::max<std::int64_t>(0, count_of(given.get<"max_seqlen_k">()));
  o.limits.max_query_len = std::max<std::int64_t>(0, count_of(given.get<"max_seqlen_q">()));
  const Tensor& lengths = call.cache_seqlens.tensor();
  o.limits.max_batch =
      small(lengths.dims == 1 && lengths.shape[0] > 0 ? lengths.shape[0] : call.batch(),
            "the number of sequences");
  if (o.limits.max_batch == 0) o.limits.max_batch = 1;
  return o;
}

bool lists_rows(const Options& o) {
  return (o.queries && o.queries->layout == Layout::listed) ||
         (o.results.part == ResultPart::rows && o.results.rows.layout == Layout::listed);
}

/// Sizes of the layer: rounded up, so that a growing sequence does not need a new one each time.
/// They are the same on all ranks.
void set_limits(Options& o, const AttendCall& call, const Totals& totals, Device device) {
  const std::int64_t rows = o.queries ? totals.most_queries : call.tokens() * call.batch();
  o.limits.max_tokens = rounded_up(rows);
  if (device == Device::host) return;
  if (lists_rows(o)) {  // the table lies on the GPU, and has an entry for each row of the layer
    o.limits.max_tokens = std::max<std::int64_t>(1, call.query_table.tensor().shape[0]);
    if (o.limits.max_tokens < rows)
      throw InputError("query_table has " + std::to_string(o.limits.max_tokens) +
                       " entries; on GPUs it has one for each of " + std::to_string(rows) +
                       " rows, the most of a rank, and -1 past this rank's own");
  }
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (o.limits.max_kv_len == 0 && totals.keys > 0)
    o.limits.max_kv_len = std::min(kMost, rounded_up(totals.keys));
  if (o.limits.max_query_len == 0 && !call.cu_seqlens_q)
    o.limits.max_query_len =
        std::min(kMost, rounded_up(o.queries ? totals.queries : call.tokens()));
}

/// Parts in rank order by another cut than the contiguous rule's are ranges, of the lengths that
/// the ranks have.
void take_ends(Options& o, const AttendCall& call, const Totals& totals) {
  if (!totals.key_ends.empty()) o.keys = {Layout::ranges};
  if (!totals.query_ends.empty()) o.queries = Sharding{Layout::ranges};
  for (const auto& [ends, table, name] :
       {std::tuple{&totals.key_ends, &call.key_table, "key_table"},
        std::tuple{&totals.query_ends, &call.query_table, "query_table"}})
    if (!ends->empty() && *table)
      throw InputError(std::string(name) + " is given, and the layout is contiguous");
}

/// The tables of a call, converted where their form differs from the layer's.
void set_tables(AttentionArgs& run, const Options& o, const AttendCall& call, const Totals& totals,
                std::int64_t batch, Device device, UniformArrays& arrays) {
  if (!totals.key_ends.empty()) run.key_table = arrays.table(device, totals.key_ends, batch);
  if (!totals.query_ends.empty()) run.query_table = arrays.table(device, totals.query_ends);
  if (lists_rows(o) && device == Device::host && call.query_table)
    run.query_table = arrays.table(
        device, listed_rows(call, o.queries ? call.tokens() : call.out.tensor().shape[0],
                            o.limits.max_tokens));
}

nb::object attend(const Arguments<kAttend>& given) {
  AttendCall call(given);
  const nb::object held =
      comm_or_default(given.get<"comm">(), call.q.tensor().device, call.q.gpu());
  Comm& comm = comm_of(held);
  call.check_gpu(comm.world().gpu());
  Options options = options_of(call, given);
  call.make_readable(options.queries.has_value());
  call.make_results(options, comm.world());
  AttentionArgs run = call.args();
  comm.alone([&](const Communicator& world) {
    const bool sharded = options.queries.has_value();
    const Totals totals = totals_of(world, call, options, true);
    take_ends(options, call, totals);
    set_limits(options, call, totals, world.device());
    const auto queue = [&](AttentionArgs& one, KeptLayer& kept, std::int64_t batch) {
      set_tables(one, options, call, totals, batch, world.device(), kept.arrays);
      set_lengths(one, call, totals, sharded, batch, world.device(), kept.arrays);
      if (call.appends_ahead(sharded ? totals.queries : call.tokens()))
        kept.layer.append(call.append_of(one, batch, world.device(), kept.arrays), call.stream);
      kept.layer.run(one, call.stream);
      if (call.needs_wait()) kept.layer.wait(call.stream);
    };
    if (totals.query_ends.empty() || call.batch() <= 1)
      return queue(run, comm.kept_layers().find(world, options), call.batch());
    // A table of query rows describes one sequence.
    options.limits.max_batch = 1;
    for (std::int64_t b = 0; b < call.batch(); ++b) {
      AttentionArgs one = call.args_of(b);
      KeptLayer& kept = comm.kept_layers().find(world, options);
      if (options.dropout.p > 0 && !one.dropout_sequences) {  // its number in the batch
        const Tensor numbers = kept.arrays.steps(world.device(), 2, b);
        one.dropout_sequences =
            Tensor(static_cast<const std::int32_t*>(numbers.data) + 1, {1}, world.device());
      }
      queue(one, kept, 1);
    }
  });
  return call.finish();
}

/// For bench/python_overhead.py: microseconds of a run in C++, with arrays read and the layer made.
/// On a GPU it is the time of queueing.
double time_attend(Argument<"q"> q, Argument<"k"> k, Argument<"v"> v, Argument<"out"> out,
                   Argument<"repeats"> repeats) {
  const Array a(q), b(k), c(v), o(out);
  const AttentionArgs args{.q = a.required().tensor(),
                           .k = b.required().tensor(),
                           .v = c.required().tensor(),
                           .out = o.required().tensor(),
                           .total_keys = b.tensor().shape[0]};
  Attention layer(self(args.q.device, a.gpu()), {.heads = small(args.q.shape[1], "heads of q"),
                                                 .kv_heads = small(args.k.shape[1], "heads of k"),
                                                 .head_dim = small(args.q.shape[2], "columns of q"),
                                                 .dtypes = {.compute = args.q.dtype},
                                                 .mask = {.causal = true},
                                                 .limits = {.max_tokens = args.q.shape[0]}});
  const std::int64_t count = integer(repeats);
  const nb::gil_scoped_release released;
  const auto begin = std::chrono::steady_clock::now();
  for (std::int64_t i = 0; i < count; ++i) layer.run(args);
  const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - begin;
  layer.wait();
  return spent.count() / static_cast<double>(count);
}

}  // namespace

void bind_attention(nb::module_& m) {
  ManyArguments<&attend, kAttend, Function::attend>::define(m, "attend");
  def_by_name(m, "time_attend", &time_attend);
}

}  // namespace longspan::python
