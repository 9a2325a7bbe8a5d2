// Attention in Python: one layer.
#include "python/src/layer.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>

#include "longspan/attention.hpp"
#include "longspan/error.hpp"
#include "longspan/storage.hpp"
#include "longspan/strategy.hpp"
#include "python/src/arrays.hpp"
#include "python/src/call.hpp"
#include "python/src/communicators.hpp"
#include "python/src/dtypes.hpp"
#include "python/src/errors.hpp"
#include "python/src/lengths.hpp"
#include "python/src/options.hpp"

namespace longspan::python {
namespace {

constexpr NameList kBackward = [] {
  NameList names = kRun;
  for (const char* const name : {"layer", "dout", "dlse", "dq", "dk", "dv", "dsinks",
                                 "dalibi_slopes", "dqq_bias", "dk_before_rope", "accumulate"})
    names.add(name);
  return names;
}();

/// The gradients of one call of backward: in the caller's arrays, or in new ones of zeros.
class Gradients {
 public:
  explicit Gradients(const Arguments<kBackward>& given)
      : dout_(Array::wide(given.get<"dout">())),
        dlse_(Array::wide(given.get<"dlse">())),
        given_{Array::wide(given.get<"dq">()), Array::wide(given.get<"dk">()),
               Array::wide(given.get<"dv">())},
        terms_{Array(given.get<"dsinks">()), Array(given.get<"dalibi_slopes">()),
               Array(given.get<"dqq_bias">())},
        dk_before_rope_(flag(given.get<"dk_before_rope">())),
        accumulate_(flag(given.get<"accumulate">())),
        copies_(given.get<"stream">()) {
    dout_.required().floats();
    for (Array& term : terms_)
      if (term) term.writable();
    for (const Array& array : given_) array.floats();
    copies_.take_unless_plain(dout_, "dout");
  }

  void check_gpu(int gpu) const {
    if (gpu < 0) return;
    require_gpu(dout_, "dout", gpu);
    require_gpu(dlse_, "dlse", gpu);
    for (std::size_t i = 0; i < terms_.size(); ++i) require_gpu(terms_[i], kTerms[i], gpu);
    for (std::size_t i = 0; i < given_.size(); ++i) require_gpu(given_[i], kNames[i], gpu);
  }

  /// The arguments; `call` has what the run had.
  GradientArgs args(const AttendCall& call) {
    const Array* const tensors[] = {&call.q, &call.k, &call.v};
    const Tensor &k = call.k.tensor(), &v = call.v.tensor();
    has_dv_ = given_[2] || k.size() == 0 || !values_in_keys(k, v);
    for (std::size_t i = 0; i < (has_dv_ ? 3 : 2); ++i) {
      if (accumulate_ && !given_[i])
        throw InputError("accumulate adds to what dq, dk and dv hold: give all three");
      made_[i] = gradient_of(given_[i], *tensors[i]);
    }
    GradientArgs g;
    g.run = call.args_of_backward();
    g.dout = exchanged(dout_.tensor());
    if (dlse_) g.dlse = Lse::tokens_heads(dlse_.tensor());
    g.dq = exchanged(made_[0].tensor());
    g.dk = made_[1].tensor();
    if (has_dv_) g.dv = made_[2].tensor();
    Tensor* const terms[] = {&g.dsinks, &g.dslopes, &g.dqq_bias};
    for (std::size_t i = 0; i < terms_.size(); ++i)
      if (terms_[i]) *terms[i] = terms_[i].tensor();
    g.dk_before_rope = dk_before_rope_;
    g.accumulate = accumulate_;
    return g;
  }

  bool needs_wait() const {
    return std::any_of(made_.begin(), made_.end(), [](const Result& r) { return r.needs_wait(); });
  }
  /// (dq, dk, dv) for Python; dv is None where dk holds it.
  nb::object finish() {
    return nb::make_tuple(made_[0].finish(), made_[1].finish(),
                          has_dv_ ? made_[2].finish() : nb::none());
  }

 private:
  static constexpr const char* kNames[] = {"dq", "dk", "dv"};
  static constexpr const char* kTerms[] = {"dsinks", "dalibi_slopes", "dqq_bias"};

  /// Rows past the sequences get no gradient, so a new array begins with zeros.
  static Result gradient_of(const Array& given, const Array& of) {
    const Tensor& t = of.tensor();
    Result made = result_of(given, of, {t.shape.data(), static_cast<std::size_t>(t.dims)}, t.dtype);
    if (!given) made.clear();
    return made;
  }

  Array dout_, dlse_;
  std::array<Array, 3> given_;
  std::array<Result, 3> made_;
  std::array<Array, 3> terms_;
  bool dk_before_rope_;
  bool accumulate_;
  bool has_dv_ = true;
  DenseCopies copies_;
};

class Layer {
 public:
  Layer(nb::handle comm, const Options& options) : held_(nb::borrow(comm)) {
    comm_of(held_).alone(
        [&](const Communicator& world) { layer_ = std::make_unique<Attention>(world, options); });
  }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  nb::object run(const Arguments<kRun>& given) {
    AttendCall call(given);
    Comm& comm = comm_of(held_);
    call.check_gpu(comm.world().gpu());
    const Options& options = layer_->options();
    call.check_types(options.dtypes.of_kv());
    call.make_readable(options.queries.has_value());
    call.make_results(options, comm.world());
    AttentionArgs run = call.args();
    comm.alone([&](const Communicator& world) {
      const bool sharded = options.queries.has_value();
      const Totals totals = totals_of(world, call, options, false);
      set_lengths(run, call, totals, sharded, call.batch(), world.device(), arrays_);
      if (call.appends_ahead(sharded ? totals.queries : call.tokens()))
        layer_->append(call.append_of(run, call.batch(), world.device(), arrays_), call.stream);
      layer_->run(run, call.stream);
      if (call.needs_wait()) layer_->wait(call.stream);
    });
    return call.finish();
  }

  nb::object backward(const Arguments<kBackward>& given) {
    AttendCall call(given);
    Gradients gradients(given);
    Comm& comm = comm_of(held_);
    call.check_gpu(comm.world().gpu());
    gradients.check_gpu(comm.world().gpu());
    const Options& options = layer_->options();
    const bool sharded = options.queries.has_value();
    call.check_types(options.dtypes.of_kv());
    call.make_readable(sharded);
    GradientArgs args = gradients.args(call);
    comm.alone([&](const Communicator& world) {
      set_lengths(args.run, call, totals_of(world, call, options, false), sharded, call.batch(),
                  world.device(), arrays_);
      layer_->backward(args, call.stream);
      if (gradients.needs_wait()) layer_->wait(call.stream);
    });
    return gradients.finish();
  }

  void append(Argument<"k_new"> k_new, Argument<"v_new"> v_new, Argument<"k"> k, Argument<"v"> v,
              Argument<"cu_seqlens_q"> cu_seqlens_q, Argument<"cache_seqlens"> cache_seqlens,
              Argument<"block_table"> block_table, Argument<"cache_batch_idx"> cache_batch_idx,
              Argument<"total_keys"> total_keys, Argument<"key_table"> key_table,
              Argument<"k_descale"> k_descale, Argument<"v_descale"> v_descale,
              Argument<"rotary_cos"> rotary_cos, Argument<"rotary_sin"> rotary_sin,
              Argument<"stream"> stream) {
    Array new_k = Array::wide(k_new);
    const Stream queue = stream_of(stream, new_k.required());
    Array new_v = Array::wide(v_new), cos(rotary_cos), sin(rotary_sin);
    const Array keys = Array::wide(k), values = Array::wide(v);
    const Array starts(cu_seqlens_q, DType::int32, queue),
        lengths(cache_seqlens, DType::int32, queue), cut(key_table, DType::int64, queue),
        k_scale(k_descale, DType::fp32), v_scale(v_descale, DType::fp32);
    for (const Array* array : {&std::as_const(new_k), &std::as_const(new_v)}) array->floats();
    if (!is_latent_row(layer_->options().dtypes.of_kv())) {
      keys.floats();
      values.floats();
    }
    DenseCopies copies(stream);
    copies.take_unless_flat(cos, "rotary_cos");
    copies.take_unless_flat(sin, "rotary_sin");
    copies.take_unless_flat(new_k, "k_new");
    copies.take_unless_flat(new_v, "v_new");
    Append a;
    a.new_k = flat(new_k.tensor(), "k_new");
    a.new_v = flat(new_v.tensor(), "v_new");
    a.k = keys.required().writable().tensor();
    a.v = values.required().writable().tensor();
    a.total_keys = std::max<std::int64_t>(0, count_of(total_keys));
    a.query_start = starts.tensor();
    a.kv_len = lengths.tensor();
    a.key_table = cut.tensor();
    a.k_scale = k_scale.tensor();
    a.v_scale = v_scale.tensor();
    a.rope_cos = cos.tensor();
    a.rope_sin = sin.tensor();
    Array table = cache_batch_idx.is_none() ? Array::table(block_table, queue)
                                            : Array(cache_batch_idx, DType::int32, queue);
    const std::int64_t batch = new_k.tensor().dims == 4 ? new_k.tensor().shape[0] : 1;
    if (!cache_batch_idx.is_none()) {
      if (!block_table.is_none())
        throw InputError(
            "cache_batch_idx and block_table are given; one of them says where keys lie");
      become_table(table, a.k, a.kv_len ? a.kv_len.shape[0] : batch, true);
    }
    a.block_table = table.tensor();
    if (batch == 0) return;  // no sequence grows; nothing is sent, so that no rank waits
    comm_of(held_).alone([&](const Communicator& world) {
      if (batch > 1 && !a.query_start)
        a.query_start = arrays_.steps(world.device(), batch + 1, new_k.tensor().shape[1]);
      layer_->append(a, queue);
    });
  }

  void wait(Argument<"stream"> stream) {
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

constexpr NameList kLayer = [] {
  NameList names{"comm"};
  add_options(names, [](const OptionInfo&) { return true; });
  return names;
}();

/// Where None has a meaning that the option itself cannot have.
constexpr NameList kMayBeNone{"kv_heads"};

nb::object make_layer(const Arguments<kLayer>& given) {
  Options o;
  take_options<kMayBeNone>(o, given);
  const auto kv_heads = given.get<"kv_heads">();
  o.kv_heads = kv_heads.is_none() ? o.heads : small(kv_heads);
  const nb::object comm = comm_or_default(given.get<"comm">(), Device::host, -1);
  return nb::cast(std::make_unique<Layer>(comm, o).release(), nb::rv_policy::take_ownership);
}

constexpr NameList kRunLayer = [] {
  NameList names = kRun;
  names.add("layer");
  return names;
}();

nb::object run_layer(const Arguments<kRunLayer>& given) {
  return nb::cast<Layer&>(given.get<"layer">()).run(given);
}

nb::object backward_layer(const Arguments<kBackward>& given) {
  return nb::cast<Layer&>(given.get<"layer">()).backward(given);
}

}  // namespace

void bind_layer(nb::module_& m) {
  nb::class_<Layer> layer(m, "Layer");
  def_by_name(layer, "append", &Layer::append, Function::layer);
  def_by_name(layer, "wait", &Layer::wait, Function::layer);
  layer.def("comm", &Layer::comm)
      .def("shard",
           [](Layer& l, nb::handle length) {
             const Shard shard = l.layer().shard(integer(length, "length"));
             return nb::make_tuple(shard.length, shard.rank, shard.ranks);
           })
      .def("keys", [](Layer& l) { return l.layer().options().keys; })
      .def("strategy", [](Layer& l) { return python_text(l.layer().strategy().name); })
      .def("exchange", [](Layer& l) { return python_text(l.layer().exchange().describe()); })
      .def("dropout_seed",
           [](Layer& l) {
             const auto [seed, offset] = l.layer().dropout_seed();
             return nb::make_tuple(seed, offset);
           })
      .def("workspace_bytes", [](Layer& l) { return l.layer().workspace_bytes(); })
      .def("phases", [](Layer& l) {
        const Phases p = l.layer().phases();
        nb::dict made;
        made["attend"] = p.attend;
        made["exchange"] = p.exchange;
        made["merge"] = p.merge;
        return made;
      });
  ManyArguments<&make_layer, kLayer, Function::layer>::define(m, "layer");
  ManyArguments<&run_layer, kRunLayer, Function::layer>::define(m, "run_layer");
  ManyArguments<&backward_layer, kBackward, Function::layer>::define(m, "backward_layer");
}

}  // namespace longspan::python
