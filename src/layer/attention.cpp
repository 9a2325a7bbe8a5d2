// The layer: it checks arguments, gives the strategy its memory, and passes each run to it.
//
//     make:  options -> agree between ranks -> kernels, strategy, memory
//     run:   args -> check -> Run -> strategy's Pass      (nothing allocated, nothing waited for)
#include "longspan/attention.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "comm/transport.hpp"
#include "kernels/backend.hpp"
#include "longspan/buffer.hpp"
#include "longspan/error.hpp"
#include "src/agreement/agreed_runs.hpp"
#include "src/agreement/agreement.hpp"
#include "src/agreement/listed_positions.hpp"
#include "src/arguments/attend_params.hpp"
#include "src/arguments/faults.hpp"
#include "src/arguments/validate.hpp"
#include "src/base/device_guard.hpp"
#include "src/base/trace.hpp"
#include "src/layer/layer_memory.hpp"
#include "src/layer/rotation.hpp"
#include "src/strategy/shared/bias_gradients.hpp"
#include "src/strategy/shared/partial_dout.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {
namespace {

/// Records marks on a stream at the start of each phase of a run, and measures the time between
/// them.
class PhaseClock {
 public:
  PhaseClock(std::unique_ptr<kernels::Timer> timer, int marks)
      : timer_(std::move(timer)), phases_(static_cast<std::size_t>(marks)) {}

  void restart() { count_ = 0; }
  void mark(Phase phase, Stream stream) {
    timer_->mark(count_, stream);
    phases_.at(static_cast<std::size_t>(count_++)) = phase;
  }
  Phases read() const {
    std::array<double, 3> spent{};
    for (int i = 0; i + 1 < count_; ++i)
      spent[static_cast<std::size_t>(phases_[static_cast<std::size_t>(i)])] +=
          timer_->milliseconds(i, i + 1);
    return {spent[0], spent[1], spent[2]};
  }

 private:
  std::unique_ptr<kernels::Timer> timer_;
  std::vector<Phase> phases_;
  int count_ = 0;
};

}  // namespace

struct Attention::Impl {
  Communicator world;
  Options options;
  const StrategyInfo* info = nullptr;
  std::unique_ptr<kernels::Backend> kernels;
  std::optional<PhaseClock> clock;
  LayerMemory memory;
  std::optional<AgreedRuns> runs;
  std::optional<ListedPositions> listed;
  std::int64_t* key_start = nullptr;  // [max_batch]
  Buffer ticket;                      // AttendParams::ticket; CUDA only
  RotatedRows rotated;                // with RoPE
  std::optional<BiasGradients> bias_gradients;
  std::optional<PartialDout> partial_dout;
  std::array<std::int64_t, 2> dropout_seed{};  // of the last run without one; the seed is rank 0's
  std::int64_t dropout_runs = 0;               // such runs
  std::unique_ptr<Strategy> strategy;
  ExchangeInfo exchange;
  FaultBox faults;                     // on CUDA, with check_arrays
  std::vector<std::uint32_t> claimed;  // host: slots that an append writes; grows to the cache's
                                       // size once

  Impl(const Communicator& communicator, const Options& given)
      : world(communicator), options(given), memory(world), rotated(options) {
    const DeviceGuard guard(world.gpu());
    const bool on_host = world.device() == Device::host;
    runs.emplace(world, "attention",
                 describe(options, on_host ? kernels::host_bf16_products(options.gradients) : ""));
    check_options(options, world.size());
    if (options.ranks_per_node == 0) options.ranks_per_node = world.ranks_per_node();
    info = &choose_strategy(world, options);
    kernels = make_kernels(world, options.threads);
    kernels->check(bounds());
    bias_gradients.emplace(options, *kernels, comm::transport_of(world));
    partial_dout.emplace(options, *kernels, comm::transport_of(world));
    strategy = entry_of(*info).make({options, *kernels, comm::transport_of(world), bounds()});
    if (options.debug.profile) {
      const int marks = strategy->most_marks() + 2;  // a rotation has one of its own
      clock.emplace(kernels->timer(marks), marks);
    }
    listed.emplace(comm::transport_of(world), options);
    if (options.dropout.p > 0) draw_seed();
    if (options.gradients) kernels->load_gradients();
    allocate();
    strategy->open(runs->layer());
    exchange = strategy->exchange();
    if (options.debug.check_arrays && world.device() == Device::cuda)
      faults = FaultBox(Device::cuda);
  }

  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  /// The seed of runs that are given none: rank 0 draws it.
  void draw_seed() {
    std::random_device source;
    const std::uint64_t own = (std::uint64_t{source()} << 32) | source();
    const std::vector<std::string> drawn =
        world.gather(fmt::to_string(own >> 1), "seed of dropout");  // a number of int64
    dropout_seed[0] = std::stoll(drawn.front());
  }

  /// The dropout of a run. Without a seed of its own it takes the next one of the layer.
  kernels::Dropout next_dropout(const RunArrays& arrays) {
    kernels::Dropout dropout = attend_dropout(options);
    dropout.seed = arrays.dropout_seed;
    dropout.seeds = arrays.dropout_seeds;
    dropout.sequences = arrays.dropout_sequences;
    if (!dropout || dropout.seed != nullptr) return dropout;
    dropout_seed[1] = dropout_runs++;
    dropout.own_seed = dropout_seed[0];
    dropout.own_offset = dropout_seed[1];
    return dropout;
  }

  /// Whether the contents of small arrays are compared too: if that needs no read of GPU memory, or
  /// was asked for.
  bool compares_contents() const {
    return world.device() == Device::host || options.debug.check_arrays;
  }

  /// Announces the arguments of this rank for the run.
  template <class Args>
  void begin(Pass& pass, const Args& args) {
    if (!runs->are_compared()) return;
    const AgreedRuns::Begun begun =
        runs->begin({args, options, world.device() == Device::host}, pass.run.stream);
    pass.own_digest = begun.own_digest;
    pass.digests = begun.digests;
    pass.merge.headers = begun.headers;
  }

  /// Checks that the ranks list every position once, if a listed table assigns them.
  void check_listed(Pass& pass) {
    if (!listed->are_checked()) return;
    pass.run.enter(Phase::exchange);
    if (world.device() == Device::host) pass.write_own_digest(*kernels);
    listed->check(pass);
  }

  /// The largest run that the options allow.
  kernels::AttendParams bounds() const {
    kernels::AttendParams p;
    p.dtype = options.dtypes.compute;
    p.q_dtype = options.dtypes.of_query();
    p.kv_dtype = options.dtypes.of_kv();
    p.tokens = options.limits.max_tokens;
    p.heads = options.heads;
    p.kv_heads = options.kv_heads;
    p.head_dim = options.head_dim;
    p.value_dim = options.of_values();
    p.batch.size = options.limits.max_batch;
    p.shard.rank = world.rank();
    p.shard.ranks = world.size();
    set_options(p, options);
    p.dropout = attend_dropout(options);
    p.rope = rope_of(options.rope, {}, {}, world.device());
    p.invariant = options.invariant;
    p.indices = bounds_of(options.indices, options.kv_heads);
    p.max_kv_len = options.limits.max_kv_len;
    p.max_query_len = options.limits.max_query_len;
    return p;
  }

  void lay_out(Parts& parts) {
    strategy->lay_out(parts);
    key_start = parts.take_array<std::int64_t>(static_cast<std::size_t>(options.limits.max_batch));
    rotated.lay_out(parts);
    bias_gradients->lay_out(parts);
    partial_dout->lay_out(parts);
    runs->lay_out(parts);
  }

  void allocate() {
    memory.allocate([this](Parts& parts) { lay_out(parts); },
                    [this] {
                      runs->allocate(*kernels, compares_contents());
                      rotated.allocate(world.device());
                      if (world.device() == Device::host) return;
                      const int zero = 0;
                      ticket = Buffer(world.device(), sizeof zero);
                      ticket.upload(&zero);
                    });
  }

  /// Whether the run needs the index of each sequence's first key: it does for several sequences,
  /// one after another.
  bool needs_key_start(const Checked& run) const {
    return run.arrays.batch > 1 && run.cache.packed;
  }
  void find_key_starts(const Checked& run, Stream stream) const {
    if (needs_key_start(run))
      kernels->key_starts(
          {run.arrays.keys, run.arrays.kv_len, run.cache.pitch, run.arrays.batch, key_start},
          stream);
  }

  kernels::AttendParams attend_params(const AttentionArgs& args, const Checked& run) const {
    const RunArrays& arrays = run.arrays;
    const CacheView& cache = run.cache;
    kernels::AttendParams p = bounds();
    p.tokens = count_rows(args.q);
    set_arrays(p, args.q, arrays);
    set_cache(p, cache);
    p.rope = rotated.rope(arrays);
    p.batch.key_start = needs_key_start(run) ? key_start : nullptr;
    p.batch.skip_decode = args.skip_decode;
    p.batch.key_pitch = cache.pages ? 0 : cache.pitch;
    if (options.queries) {
      p.queries = arrays.queries;
      if (world.size() > 1) std::swap(p.batch.query_start, p.batch.whole_query_start);
    }
    p.shard = arrays.keys;
    p.ticket = static_cast<int*>(ticket.data());
    return p;
  }

  kernels::MergeParams merge_params(const AttentionArgs& args, const RunArrays& arrays) const {
    const ResultPart part = options.results.part;
    kernels::MergeParams p;
    p.heads = options.heads;
    p.sinks = arrays.sinks;
    if (part == ResultPart::heads) {
      const HeadRange own = result_heads(options.heads, world.rank(), world.size());
      p.heads = own.size();
      p.state_heads = options.heads;
      p.first_head = own.begin;
      p.sinks = floats_from(arrays.sinks, own.begin);
    }
    p.tokens = count_rows(args.out);
    p.dtype = options.dtypes.of_out();
    p.out_scale = {arrays.out_scale};
    const bool dealt = options.queries && world.size() > 1;  // then a strategy knows which rows
    if (!dealt && part != ResultPart::rows)
      p.batch = {arrays.batch, arrays.query_start, arrays.kv_len, nullptr,
                 nullptr,      args.skip_decode};
    p.out = token_rows_of(args.out);
    p.lse = token_lse_of(args.lse);
    return p;
  }

  kernels::AppendParams append_params(const Append& tokens, const Checked& run) const {
    const RunArrays& arrays = run.arrays;
    const CacheView& cache = run.cache;
    kernels::AppendParams p;
    set_sizes(p, bounds());
    p.tokens = tokens.new_k.shape[0];
    p.new_k = rows_of(tokens.new_k);
    if (tokens.new_v) p.new_v = rows_of(tokens.new_v);
    set_cache(p, cache);
    p.batch = {arrays.batch, arrays.query_start, arrays.kv_len,
               needs_key_start(run) ? key_start : nullptr};
    p.batch.key_pitch = cache.pages ? 0 : cache.pitch;
    p.shard = arrays.keys;
    p.k_scale = arrays.k_scale;
    p.v_scale = arrays.v_scale;
    p.rope = rotated.rope(arrays);
    return p;
  }

  kernels::CheckParams append_checks(const kernels::AppendParams& append,
                                     const CacheView& cache) const {
    kernels::CheckParams p;
    p.geometry = bounds();
    p.geometry.tokens = append.tokens;
    p.geometry.batch = append.batch;
    p.geometry.shard = append.shard;
    p.pages = append.pages;
    p.geometry.max_query_len = 0;  // the limit is for queries; a longer prompt may be appended
    p.geometry.mask.alignment = Alignment::lower_right;  // new keys are the last of a sequence
    p.is_append = true;
    p.slot_count = cache.keys;
    p.rope_positions = append.rope.positions;
    return p;
  }

  /// Checks the arrays on their device: on the host at once; on CUDA before the kernels, if the
  /// options ask for it, with wait() as the reporter.
  void check_arrays(kernels::CheckParams p, Stream stream) {
    if (world.device() == Device::cuda) {
      if (!faults) return;
      p.report = faults.report();
      kernels->check_arrays(p, stream);
      return;
    }
    kernels::FaultReport found;
    if (p.is_append) {
      claimed.assign(static_cast<std::size_t>(p.slot_count / 32 + 1), 0);
      p.claimed = claimed.data();
    }
    p.report = &found;
    kernels->check_arrays(p, stream);
    throw_fault(found);
  }

  /// Makes attention also write the new keys into the cache.
  void give_new_keys(kernels::AttendParams& attend, const Append& tokens, const Checked& run,
                     Stream stream) {
    const kernels::AppendParams p = append_params(tokens, run);
    check_arrays(append_checks(p, run.cache), stream);
    attend.new_k = p.new_k;
    attend.new_v = p.new_v;
  }

  /// The arguments as strategies see them: with RoPE the rotated rows are q.
  AttentionArgs with_rotated(AttentionArgs args) const {
    if (rotated) args.q = rotated.view(args.q);
    return args;
  }

  /// `has_phases`: it marks them, if the layer measures phases.
  Run make_run(const AttentionArgs& args, const Checked& checked, Stream stream,
               bool has_phases = true) {
    const bool timed = has_phases && clock.has_value();
    kernels::AttendParams attend = attend_params(args, checked);
    attend.dropout = next_dropout(checked.arrays);
    return {.args = args,
            .arrays = checked.arrays,
            .stream = stream,
            .attend = attend,
            .merge = merge_params(args, checked.arrays),
            .listed_keys = listed->counts(),
            .timed = timed,
            .enter =
                [this, stream, timed](Phase phase) {
                  if (timed) clock->mark(phase, stream);
                },
            .rotated_starts = rotated.starts(checked.arrays)};
  }
};

Attention::Attention(const Communicator& world, const Options& options)
    : impl_(std::make_unique<Impl>(world, options)) {}
Attention::~Attention() = default;
Attention::Attention(Attention&&) noexcept = default;
Attention& Attention::operator=(Attention&&) noexcept = default;

void Attention::run(const AttentionArgs& given, Stream stream) {
  const trace::Range range("longspan run");
  AttentionArgs args = with_batch_rows(given);
  Impl& layer = *impl_;
  const DeviceGuard guard(layer.world.gpu());
  const auto described = [&] { return RunDescription(args, layer.options); };
  const Checked checked = layer.runs->checked(
      [&] {
        args.v = values_of(args.k, args.v, layer.options);
        return check_attention(args, layer.options, layer.world);
      },
      described);
  layer.runs->check();
  const AttentionArgs turned = layer.with_rotated(args);
  const Run run = layer.make_run(turned, checked, stream);
  Pass pass(run);
  layer.strategy->prepare(pass);
  layer.runs->checked([&] { layer.kernels->check(pass.attend); }, described);
  layer.begin(pass, args);
  if (layer.clock) layer.clock->restart();
  layer.find_key_starts(checked, stream);
  kernels::CheckParams checks = checks_of(pass.attend, checked.cache.keys);
  checks.sequence_rows = token_rows_of(args.q).gap.rows;
  if (pass.keys_travel) checks.geometry = run.all_rows();
  checks.most_keys = layer.options.limits.max_total_keys;
  layer.check_arrays(checks, stream);
  layer.check_listed(pass);
  if (args.new_k) layer.give_new_keys(pass.attend, append_of(args), checked, stream);
  if (layer.rotated) layer.rotated.rotate(run, token_rows_of(args.q), *layer.kernels);
  layer.strategy->queue(pass);
  run.enter(Phase::merge);  // the end of the last phase
}

void Attention::backward(const GradientArgs& given, Stream stream) {
  const trace::Range range("longspan backward");
  GradientArgs args = with_batch_rows(given);
  Impl& layer = *impl_;
  const DeviceGuard guard(layer.world.gpu());
  const Checked checked =
      layer.runs->checked([&] { return check_gradients(args, layer.options, layer.world); },
                          [&] { return RunDescription(args, layer.options); });
  layer.runs->check();
  const AttentionArgs turned = layer.with_rotated(args.run);
  const Run run = layer.make_run(turned, checked, stream, false);
  Pass pass(run);
  layer.strategy->prepare(pass);
  layer.begin(pass, args);
  layer.find_key_starts(checked, stream);
  layer.check_listed(pass);
  if (layer.rotated) layer.rotated.rotate(run, token_rows_of(args.run.q), *layer.kernels);
  if (*layer.partial_dout) args = layer.partial_dout->add_up(pass, args);
  layer.bias_gradients->begin(pass, args);
  layer.strategy->backward(pass, args);
  layer.bias_gradients->finish(pass, args);
}

void Attention::append(const Append& given, Stream stream) {
  const trace::Range range("longspan append");
  Impl& layer = *impl_;
  Append tokens = given;
  tokens.v = values_of(given.k, given.v, layer.options);
  const DeviceGuard guard(layer.world.gpu());
  const Checked checked = check_append(tokens, layer.options, layer.world);
  layer.find_key_starts(checked, stream);
  const kernels::AppendParams p = layer.append_params(tokens, checked);
  layer.check_arrays(layer.append_checks(p, checked.cache), stream);
  layer.kernels->append(p, stream);
}

void Attention::wait(Stream stream) {
  const DeviceGuard guard(impl_->world.gpu());
  comm::transport_of(impl_->world).wait(stream, "attention");
  impl_->runs->check();
  if (impl_->faults) impl_->faults.read();
}

const Options& Attention::options() const { return impl_->options; }
const Communicator& Attention::world() const { return impl_->world; }
const StrategyInfo& Attention::strategy() const { return *impl_->info; }
Shard Attention::shard(std::int64_t length) const {
  const Sharding& keys = impl_->options.keys;
  if (keys.layout == Layout::ranges || keys.layout == Layout::listed)
    throw UsageError(fmt::format(
        "the keys of this layer are {}: their table says what a rank holds, not the rule alone",
        name(keys.layout)));
  return keys.resolve(length, impl_->world.rank(), impl_->world.size());
}
const ExchangeInfo& Attention::exchange() const { return impl_->exchange; }
std::array<std::int64_t, 2> Attention::dropout_seed() const { return impl_->dropout_seed; }
std::size_t Attention::workspace_bytes() const { return impl_->memory.bytes(); }

Phases Attention::phases() const { return impl_->clock ? impl_->clock->read() : Phases{}; }

void attend(const Communicator& world, const AttentionArgs& given, Options options) {
  const AttentionArgs args = with_batch_rows(given);
  check_one_call(args, options.dtypes.of_kv());
  agree(world, describe_shardings(options), "attend");  // what follows depends on it
  const Tensor& q = args.q;
  options.heads = static_cast<int>(q.shape[q.dims - 2]);
  const Tensor& k = args.k;
  options.kv_heads = static_cast<int>(k.shape[k.dims == 5 ? 1 : k.dims - 2]);
  options.head_dim = static_cast<int>(q.shape[q.dims - 1]);
  options.value_dim = static_cast<int>(args.out.shape[args.out.dims - 1]);
  if (!is_fp8(q.dtype)) options.dtypes.compute = q.dtype;
  options.dtypes.query = q.dtype;
  if (!is_latent_row(options.dtypes.of_kv())) options.dtypes.kv = k.dtype;
  options.dtypes.out = args.out.dtype;
  options.limits.max_batch = batch_of(args.kv_len);
  if (args.indices.dims > 0 && options.indices.top_k == 0)
    options.indices.top_k = static_cast<int>(
        std::clamp<std::int64_t>(args.indices.shape[args.indices.dims - 1], 1, 1 << 24));
  options.limits.max_tokens = count_rows(q);
  if (options.queries) {
    options.limits.max_tokens = 0;
    for (const std::string& rows :
         world.gather(std::to_string(count_rows(q)), "count of query rows"))
      options.limits.max_tokens =
          std::max<std::int64_t>(options.limits.max_tokens, std::stoll(rows));
  }
  arrays_of(args, options, world.rank(), world.size(), world.device());  // what is described fits
  agree(world, RunDescription(args, options, false).text(nullptr, 0), "attend");
  Attention layer(world, options);
  layer.run(given);
  layer.wait();
}

}  // namespace longspan
