// Attention in Python: one layer.
#include "python/src/layer.hpp"

#include <algorithm>
#include <memory>

#include "longspan/attention.hpp"
#include "longspan/strategy.hpp"
#include "python/src/arrays.hpp"
#include "python/src/call.hpp"
#include "python/src/communicators.hpp"
#include "python/src/dtypes.hpp"
#include "python/src/errors.hpp"
#include "python/src/lengths.hpp"
#include "python/src/words.hpp"

namespace longspan::python {
namespace {

class Layer {
 public:
  Layer(nb::handle comm, const Options& options) : held_(nb::borrow(comm)) {
    comm_of(held_).alone(
        [&](const Communicator& world) { layer_ = std::make_unique<Attention>(world, options); });
  }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  nb::object run(nb::args args) {
    if (args.size() != kGiven) throw nb::type_error("run: see longspan.Attention");
    Call call(unpack<Given>(args, 0));
    Comm& comm = comm_of(held_);
    call.check_gpu(comm.world().gpu());
    const Options& options = layer_->options();
    call.make_readable(options.queries.has_value());
    call.make_results(options, comm.world());
    AttentionArgs run = call.args();
    comm.alone([&](const Communicator& world) {
      const bool sharded = options.queries.has_value();
      set_lengths(run, call, totals_of(world, call, options, false), sharded, call.batch(),
                  world.device(), arrays_);
      layer_->run(run, call.stream);
      if (call.needs_wait()) layer_->wait(call.stream);
    });
    return call.finish();
  }

  void append(nb::handle k_new, nb::handle v_new, nb::handle k, nb::handle v,
              nb::handle cu_seqlens_q, nb::handle cache_seqlens, nb::handle block_table,
              nb::handle total_keys, nb::handle key_table, nb::handle k_descale,
              nb::handle v_descale, nb::handle stream) {
    Array new_k(k_new, "k_new");
    const Stream queue = stream_of(stream, new_k.required());
    Array new_v(v_new, "v_new");
    const Array keys(k, "k"), values(v, "v"),
        starts(cu_seqlens_q, "cu_seqlens_q", DType::int32, queue),
        lengths(cache_seqlens, "cache_seqlens", DType::int32, queue),
        table(Array::table(block_table, "block_table", queue)),
        cut(key_table, "key_table", DType::int64, queue),
        k_scale(k_descale, "k_descale", DType::fp32), v_scale(v_descale, "v_descale", DType::fp32);
    for (const Array* array : {&std::as_const(new_k), &std::as_const(new_v), &keys, &values})
      array->floats();
    DenseCopies copies(stream);
    copies.take_unless_flat(new_k, "k_new");
    copies.take_unless_flat(new_v, "v_new");
    Append a;
    a.new_k = flat(new_k.tensor(), "k_new");
    a.new_v = flat(new_v.tensor(), "v_new");
    a.k = keys.required().writable().tensor();
    a.v = values.required().writable().tensor();
    a.total_keys = std::max<std::int64_t>(0, count_of(total_keys, "total_keys"));
    a.query_start = starts.tensor();
    a.kv_len = lengths.tensor();
    a.block_table = table.tensor();
    a.key_table = cut.tensor();
    a.k_scale = k_scale.tensor();
    a.v_scale = v_scale.tensor();
    const std::int64_t batch = new_k.tensor().dims == 4 ? new_k.tensor().shape[0] : 1;
    if (batch == 0) return;  // no sequence grows; nothing is sent, so that no rank waits
    comm_of(held_).alone([&](const Communicator& world) {
      if (batch > 1 && !a.query_start)
        a.query_start = arrays_.steps(world.device(), batch + 1, new_k.tensor().shape[1]);
      layer_->append(a, queue);
    });
  }

  void wait(nb::handle stream) {
    const Stream queue = stream.is_none() ? Stream{} : given_stream(stream);
    comm_of(held_).alone([&](const Communicator&) { layer_->wait(queue); });
  }

  Attention& layer() { return *layer_; }
  nb::object comm() { return held_; }

 private:
  nb::object held_;
  std::unique_ptr<Attention> layer_;
  UniformArrays arrays_;
};

Layer* make_layer(nb::handle given, nb::handle heads, nb::handle kv_heads, nb::handle head_dim,
                  nb::handle value_dim, nb::handle dtype, nb::handle q_dtype, nb::handle kv_dtype,
                  nb::handle out_dtype, nb::handle causal, nb::handle softmax_scale,
                  nb::handle window_size, nb::handle softcap, nb::handle alibi, nb::handle keys,
                  nb::handle queries, nb::handle results, nb::handle max_queries,
                  nb::handle max_batch, nb::handle max_seqlen_k, nb::handle max_total_keys,
                  nb::handle max_seqlen_q, nb::handle invariant, nb::handle strategy,
                  nb::handle exchange, nb::handle threads, nb::handle check_arrays,
                  nb::handle profile, nb::handle tf32, nb::handle fp8_products,
                  nb::handle bf16_products, nb::handle ranks_per_node) {
  Options o;
  o.heads = small(integer(heads, "heads"), "heads");
  o.kv_heads = kv_heads.is_none() ? o.heads : small(integer(kv_heads, "kv_heads"), "kv_heads");
  o.head_dim = small(integer(head_dim, "head_dim"), "head_dim");
  if (!value_dim.is_none()) o.value_dim = small(integer(value_dim, "value_dim"), "value_dim");
  o.dtypes.compute = dtype_of(dtype, "dtype");
  if (!q_dtype.is_none()) o.dtypes.query = dtype_of(q_dtype, "q_dtype");
  if (!kv_dtype.is_none()) o.dtypes.kv = dtype_of(kv_dtype, "kv_dtype");
  if (!out_dtype.is_none()) o.dtypes.out = dtype_of(out_dtype, "out_dtype");
  o.dtypes.tf32 = flag(tf32, "tf32");
  o.dtypes.fp8_products = flag(fp8_products, "fp8_products");
  o.dtypes.bf16_products = flag(bf16_products, "bf16_products");
  o.mask = mask_of(causal, window_size);
  o.score = score_of(softmax_scale, softcap, alibi_of(alibi));
  o.keys = sharding_of(keys, "keys");
  o.queries = maybe_sharding(queries, "queries");
  o.results = results_of(results);
  o.limits.max_tokens = integer(max_queries, "max_queries");
  o.limits.max_batch = small(integer(max_batch, "max_batch"), "max_batch");
  o.limits.max_kv_len = integer(max_seqlen_k, "max_seqlen_k");
  o.limits.max_total_keys = integer(max_total_keys, "max_total_keys");
  o.limits.max_query_len = integer(max_seqlen_q, "max_seqlen_q");
  o.invariant = flag(invariant, "invariant");
  o.strategy = text(strategy, "strategy");
  o.ranks_per_node = small(integer(ranks_per_node, "ranks_per_node"), "ranks_per_node");
  o.exchange = exchange_of(exchange);
  o.threads = small(integer(threads, "threads"), "threads");
  o.debug.check_arrays = flag(check_arrays, "check_arrays");
  o.debug.profile = flag(profile, "profile");
  return new Layer(comm_or_default(given, Device::host, -1), o);
}

}  // namespace

void bind_layer(nb::module_& m) {
  nb::class_<Layer> layer(m, "Layer");
  def_by_position(layer, "append", &Layer::append, Function::layer);
  def_by_position(layer, "run", &Layer::run, Function::layer);
  def_by_position(layer, "wait", &Layer::wait, Function::layer);
  layer.def("comm", &Layer::comm)
      .def("shard",
           [](Layer& l, nb::handle length) {
             const Shard shard = l.layer().shard(integer(length, "length"));
             return nb::make_tuple(shard.length, shard.rank, shard.ranks);
           })
      .def("keys", [](Layer& l) { return l.layer().options().keys; })
      .def("strategy", [](Layer& l) { return python_text(l.layer().strategy().name); })
      .def("exchange", [](Layer& l) { return python_text(l.layer().exchange().describe()); })
      .def("workspace_bytes", [](Layer& l) { return l.layer().workspace_bytes(); })
      .def("phases", [](Layer& l) {
        const Phases p = l.layer().phases();
        nb::dict made;
        made["attend"] = p.attend;
        made["exchange"] = p.exchange;
        made["merge"] = p.merge;
        return made;
      });
  def_by_position(m, "layer", &make_layer, Function::layer);
}

}  // namespace longspan::python
