// The layer: checks, gives the strategy its memory, and hands each run to it.
//
//     make:  options -> agree between ranks -> kernels, strategy, memory
//     run:   request -> check -> Run -> strategy          (nothing allocated, nothing waited for)
#include "longspan/attention.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/transport.hpp"
#include "kernels/backend.hpp"
#include "longspan/buffer.hpp"
#include "longspan/error.hpp"
#include "longspan/info.hpp"
#include "src/agreement.hpp"
#include "src/faults.hpp"
#include "src/strategy/strategy.hpp"
#include "src/trace.hpp"
#include "src/validate.hpp"

namespace longspan {
namespace {

std::unique_ptr<kernels::Backend> make_kernels(const Communicator& world, int threads) {
  if (world.device() == Device::cuda) return kernels::cuda_backend();
  return kernels::host_backend(host_threads(world, threads));
}

/// Makes one rank's failure everybody's: a step that can fail on some ranks only (memory) must not
/// leave the others waiting in the next one.
void settle(const Communicator& world, const std::string& failure, const std::string& step) {
  const std::vector<std::string> all = world.gather(failure, step);
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].empty())
      throw BackendError(fmt::format("{} failed on rank {}: {}", step, rank, all[rank]));
}

/// Keeps memory until the process ends. A receive whose sender stopped in the middle of it cannot
/// be called back, and MPI goes on writing when the sender goes on, after the run has failed and
/// the layer is gone.
void keep_for_good(Buffer memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<Buffer>;  // never ends, so neither does what it holds
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

/// Stream marks at the start of each phase of a run, and the time between them.
class PhaseClock {
 public:
  explicit PhaseClock(std::unique_ptr<kernels::Timer> timer) : timer_(std::move(timer)) {}

  void restart() { count_ = 0; }
  void mark(Phase phase, Stream stream) {
    timer_->mark(count_, stream);
    phases_[count_++] = phase;
  }
  Phases read() const {
    std::array<double, 3> spent{};
    for (int i = 0; i + 1 < count_; ++i)
      spent[static_cast<int>(phases_[i])] += timer_->milliseconds(i, i + 1);
    return {spent[0], spent[1], spent[2]};
  }

  static constexpr int kMarks = 16;

 private:
  std::unique_ptr<kernels::Timer> timer_;
  std::array<Phase, kMarks> phases_{};
  int count_ = 0;
};

}  // namespace

struct Attention::Impl {
  Communicator world;
  Options options;
  const StrategyInfo* info = nullptr;
  std::unique_ptr<kernels::Backend> kernels;
  std::optional<PhaseClock> clock;
  Buffer memory;
  std::int64_t* key_start = nullptr;  // [max_batch]
  std::uint64_t* said = nullptr;      // [ranks] what each says of its run (RunHeaders)
  Buffer ticket;                      // AttendParams::ticket; CUDA only
  std::unique_ptr<Strategy> strategy;
  ExchangeInfo exchange;
  FaultBox faults;  // CUDA with check_arrays
  // With several ranks: what they mean by the last runs, and what a merge found to differ.
  std::shared_ptr<RunHistory> history;
  std::uint32_t number = 0;               // of this layer among those of the communicator
  std::shared_ptr<std::uint64_t> report;  // [1] RunHeaders::reported
  std::vector<std::uint32_t> claimed;  // host: slots that an append writes; grows to the cache once

  Impl(const Communicator& communicator, const Options& given)
      : world(communicator), options(given) {
    agree(world, describe(options), "making of the layer");
    check_options(options, world.size());
    info = &choose_strategy(options, world.size());
    kernels = make_kernels(world, options.threads);
    kernels->check(bounds());
    if (options.profile) clock.emplace(kernels->timer(PhaseClock::kMarks));
    strategy =
        entry_of(*info).make({options, *kernels, *kernels, comm::transport_of(world), bounds()});
    allocate();
    strategy->open(number);
    exchange = strategy->exchange();
    if (options.check_arrays && world.device() == Device::cuda) faults = FaultBox(Device::cuda);
  }

  ~Impl() {
    if (world.size() == 1 || world.device() != Device::host) return;
    try {
      comm::transport_of(world).check("end of the layer");
    } catch (...) {
      try {
        keep_for_good(std::move(memory));
      } catch (...) {  // no memory for the list: the vector was not touched, and the buffer ends
      }
    }
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  /// The contents of small arrays are compared too where that costs no look at GPU memory, or was
  /// asked for.
  bool compares_contents() const { return world.device() == Device::host || options.check_arrays; }

  /// Memory that kernels report to, and the place of this layer in the roll call.
  void keep_history() {
    if (world.size() == 1) return;
    const auto words = [&](std::size_t count) {
      const auto bytes = kernels->shared_memory(count * sizeof(std::uint64_t));
      return std::shared_ptr<std::uint64_t>(bytes, reinterpret_cast<std::uint64_t*>(bytes.get()));
    };
    report = words(1);
    constexpr std::size_t kWords = RunHistory::kRuns * (kernels::DigestParams::kMostArrays + 1);
    history = std::make_shared<RunHistory>(compares_contents() ? words(kWords) : nullptr);
  }

  /// Names the run to the transport, and says what this rank means by it.
  void begin(Run& run, const Request& request) const {
    if (!history) return;
    const RunDescription description(request, options, world.device() == Device::host);
    const std::uint32_t of_run = history->add(description);
    comm::transport_of(world).begin({number, of_run});
    run.say = {description.hash(), nullptr, said + world.rank()};
    if (std::uint64_t* words = history->words(of_run)) {
      const kernels::DigestParams arrays = description.arrays(words);
      kernels->digest(arrays, run.stream);
      run.say.contents = words + arrays.count;
    }
    run.said = said;
    run.merge.headers = {said, world.rank(), world.size(), of_run, report.get()};
  }

  /// Throws what a merge of gathered states found to differ.
  void look_at_report() const {
    if (!report) return;
    const std::uint64_t found = *static_cast<const volatile std::uint64_t*>(report.get());
    if (found == 0) return;
    const auto run = static_cast<std::uint32_t>(found >> 32);
    comm::transport_of(world).disagree({number, run}, static_cast<int>(found & 0xffffffffu) - 1,
                                       "attention");
  }

  /// The largest run that the options allow.
  kernels::AttendParams bounds() const {
    kernels::AttendParams p;
    p.dtype = options.dtype;
    p.q_dtype = options.query_dtype.value_or(options.dtype);
    p.kv_dtype = options.kv_dtype.value_or(options.dtype);
    p.tokens = options.max_tokens;
    p.heads = options.heads;
    p.kv_heads = options.kv_heads;
    p.head_dim = options.head_dim;
    p.value_dim = options.value_dim.value_or(options.head_dim);
    p.batch.size = options.max_batch;
    p.shard.rank = world.rank();
    p.shard.ranks = world.size();
    p.mask = options.mask;
    p.score.scale = options.scale.value_or(1.0f / std::sqrt(static_cast<float>(options.head_dim)));
    p.score.softcap = options.softcap;
    p.bias.alibi = options.alibi;
    p.invariant = options.invariant;
    p.tf32 = options.tf32;
    p.fp8_products = options.fp8_products;
    p.max_kv_len = options.max_kv_len;
    p.max_query_len = options.max_query_len;
    return p;
  }

  void lay_out(Parts& parts) {
    strategy->lay_out(parts);
    key_start = parts.take_array<std::int64_t>(static_cast<std::size_t>(options.max_batch));
    said = parts.take_array<std::uint64_t>(static_cast<std::size_t>(world.size()));
  }

  void allocate() {
    Parts count;
    lay_out(count);
    std::string failure;
    try {
      memory = Buffer(world.device(), count.bytes);
      keep_history();
      if (world.device() == Device::cuda) {
        const int zero = 0;
        ticket = Buffer(world.device(), sizeof zero);
        ticket.upload(&zero);
      }
    } catch (const std::exception& error) {
      failure = fmt::format("{} bytes: {}", count.bytes, error.what());
    }
    settle(world, failure, "allocation of the workspace");
    if (history) number = comm::transport_of(world).enlist(history);
    Parts parts{static_cast<std::byte*>(memory.data())};
    lay_out(parts);
  }

  /// Where the first key of each sequence lies: needed for several, one after the other.
  bool needs_key_start(int batch, const CacheView& cache) const {
    return batch > 1 && cache.packed;
  }
  void find_key_starts(const Shard& shard, const std::int32_t* kv_len, int batch,
                       const CacheView& cache, Stream stream) const {
    if (needs_key_start(batch, cache))
      kernels->key_starts({shard, kv_len, cache.pitch, batch, key_start}, stream);
  }

  kernels::AttendParams attend_params(const Request& request, const CacheView& cache) const {
    kernels::AttendParams p = bounds();
    p.tokens = request.q.shape[0];
    p.q = rows_of(request.q);
    p.k = cache.k;
    p.v = cache.v;
    p.pages = cache.pages;
    p.q_scale = request.q_scale;
    p.k_scale = request.k_scale;
    p.v_scale = request.v_scale;
    p.batch = {request.batch,
               request.query_start,
               request.kv_len,
               needs_key_start(request.batch, cache) ? key_start : nullptr,
               request.causal,
               request.skip_decode,
               cache.pages ? 0 : cache.pitch};
    if (options.shard_queries) {
      p.queries = request.query_shard;
      if (world.size() > 1) std::swap(p.batch.query_start, p.batch.whole_query_start);
    }
    p.shard = request.shard;
    p.documents = request.documents;
    p.bias.slopes = request.slopes;
    p.bias.qq = request.qq_bias;
    p.ticket = static_cast<int*>(ticket.data());
    return p;
  }

  kernels::MergeParams merge_params(const Request& request) const {
    kernels::MergeParams p;
    p.heads = options.heads;
    p.sinks = request.sinks;
    p.tokens = request.q.shape[0];
    p.dtype = options.out_dtype.value_or(options.dtype);
    p.out_scale = {request.out_scale};
    if (!options.shard_queries)  // else the map of rows says which there are
      p.batch = {request.batch, request.query_start, request.kv_len, nullptr,
                 nullptr,       request.skip_decode};
    p.out = rows_of(request.out);
    const kernels::LseView lse = lse_of(request.lse);
    p.lse = lse.data;
    p.lse_row_stride = lse.row_stride;
    p.lse_head_stride = lse.head_stride;
    return p;
  }

  kernels::AppendParams append_params(const Append& tokens, const CacheView& cache) const {
    kernels::AppendParams p;
    p.dtype = options.dtype;
    p.kv_dtype = options.kv_dtype.value_or(options.dtype);
    p.tokens = tokens.new_k.shape[0];
    p.kv_heads = options.kv_heads;
    p.head_dim = options.head_dim;
    p.value_dim = options.value_dim.value_or(options.head_dim);
    p.new_k = rows_of(tokens.new_k);
    if (tokens.new_v) p.new_v = rows_of(tokens.new_v);
    p.k = cache.k;
    p.v = cache.v;
    p.pages = cache.pages;
    p.batch = {tokens.batch, tokens.query_start, tokens.kv_len,
               needs_key_start(tokens.batch, cache) ? key_start : nullptr};
    p.batch.key_pitch = cache.pages ? 0 : cache.pitch;
    p.shard = tokens.shard;
    p.k_scale = tokens.k_scale;
    p.v_scale = tokens.v_scale;
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
    p.geometry.max_query_len = 0;  // a promise about queries; a longer prompt may be appended
    p.is_append = true;
    p.slot_count = cache.keys;
    return p;
  }

  /// Checks the arrays where they lie: at once on the host; ahead of the kernels on CUDA, for
  /// wait() to report, when the options ask for it.
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

  /// Attention writes them into the cache.
  void give_new_keys(kernels::AttendParams& attend, const Append& tokens, const CacheView& cache,
                     Stream stream) {
    const kernels::AppendParams p = append_params(tokens, cache);
    check_arrays(append_checks(p, cache), stream);
    attend.new_k = p.new_k;
    attend.new_v = p.new_v;
  }

  Run make_run(const Request& request, const CacheView& cache, Stream stream) {
    Run run{.request = request,
            .stream = stream,
            .attend = attend_params(request, cache),
            .merge = merge_params(request),
            .timed = clock.has_value(),
            .enter = [this, stream](Phase phase) {
              if (clock) clock->mark(phase, stream);
            }};
    strategy->prepare(run);
    return run;
  }
};

Attention::Attention(const Communicator& world, const Options& options)
    : impl_(std::make_unique<Impl>(world, options)) {}
Attention::~Attention() = default;
Attention::Attention(Attention&&) noexcept = default;
Attention& Attention::operator=(Attention&&) noexcept = default;

void Attention::run(const Request& request, Stream stream) {
  const trace::Range range("longspan run");
  Impl& layer = *impl_;
  const CacheView cache = check_request(request, layer.options, layer.world);
  layer.look_at_report();
  Run run = layer.make_run(request, cache, stream);
  layer.kernels->check(run.attend);
  layer.begin(run, request);
  if (layer.clock) layer.clock->restart();
  layer.find_key_starts(request.shard, request.kv_len, request.batch, cache, stream);
  layer.check_arrays(checks_of(run.attend, cache.keys), stream);
  if (request.new_k) layer.give_new_keys(run.attend, append_of(request), cache, stream);
  layer.strategy->queue(run);
  run.enter(Phase::merge);  // the end of the last phase
}

void Attention::append(const Append& tokens, Stream stream) {
  const trace::Range range("longspan append");
  Impl& layer = *impl_;
  const CacheView cache = check_append(tokens, layer.options, layer.world);
  layer.find_key_starts(tokens.shard, tokens.kv_len, tokens.batch, cache, stream);
  const kernels::AppendParams p = layer.append_params(tokens, cache);
  layer.check_arrays(layer.append_checks(p, cache), stream);
  layer.kernels->append(p, stream);
}

void Attention::wait(Stream stream) {
  comm::transport_of(impl_->world).wait(stream, "attention");
  impl_->look_at_report();
  if (impl_->faults) impl_->faults.read();
}

const Options& Attention::options() const { return impl_->options; }
const Communicator& Attention::world() const { return impl_->world; }
const StrategyInfo& Attention::strategy() const { return *impl_->info; }
const ExchangeInfo& Attention::exchange() const { return impl_->exchange; }
std::size_t Attention::workspace_bytes() const { return impl_->memory.bytes(); }

Phases Attention::phases() const { return impl_->clock ? impl_->clock->read() : Phases{}; }

void attend(const Communicator& world, const Request& request, Options options) {
  check_one_call(request);
  const Tensor& q = request.q;
  options.heads = static_cast<int>(q.shape[1]);
  const Tensor& k = request.k;
  options.kv_heads = static_cast<int>(k.shape[k.dims == 5 ? 1 : k.dims - 2]);
  options.head_dim = static_cast<int>(q.shape[2]);
  options.value_dim = static_cast<int>(request.out.shape[2]);
  if (!is_fp8(q.dtype)) options.dtype = q.dtype;
  options.query_dtype = q.dtype;
  options.kv_dtype = k.dtype;
  options.out_dtype = request.out.dtype;
  options.max_batch = request.batch;
  options.max_tokens = q.shape[0];
  if (options.shard_queries) {
    options.max_tokens = 0;
    for (const std::string& rows : world.gather(std::to_string(q.shape[0]), "count of query rows"))
      options.max_tokens = std::max<std::int64_t>(options.max_tokens, std::stoll(rows));
  }
  agree(world, RunDescription(request, options, false).text(nullptr), "attend");
  Attention layer(world, options);
  layer.run(request);
  layer.wait();
}

}  // namespace longspan
