// The layer: checks, lays out the workspace, and hands each run to its strategy.
//
//     make:  options -> agree between ranks -> kernels, workspace
//     run:   request -> check -> Job -> strategy          (nothing allocated, nothing waited for)
#include "longspan/attention.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <thread>
#include <utility>

#include "comm/transport.hpp"
#include "kernels/backend.hpp"
#include "longspan/buffer.hpp"
#include "longspan/error.hpp"
#include "src/env.hpp"
#include "src/strategy/table.hpp"
#include "src/trace.hpp"
#include "src/validate.hpp"
#include "src/workspace.hpp"

namespace longspan {
namespace {

/// Cores for each rank of this node, at least 1.
int share_of_cores(const Communicator& world) {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  const std::vector<std::string> hosts = world.gather(host.data(), "count of ranks on a node");
  const auto neighbours = std::count(hosts.begin(), hosts.end(), host.data());
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, cores / static_cast<int>(std::max<std::ptrdiff_t>(1, neighbours)));
}

std::unique_ptr<kernels::Backend> make_kernels(const Communicator& world, int threads) {
  if (world.device() == Device::cuda) return kernels::cuda_backend();
  const int share = share_of_cores(world);
  if (threads == 0) threads = Env::read().threads;
  return kernels::host_backend(threads > 0 ? threads : share);
}

/// Makes one rank's failure everybody's: a step that can fail on some ranks only (memory) must not
/// leave the others waiting in the next one.
void settle(const Communicator& world, const std::string& failure, const std::string& step) {
  const std::vector<std::string> all = world.gather(failure, step);
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].empty())
      throw BackendError(fmt::format("{} failed on rank {}: {}", step, rank, all[rank]));
}

kernels::Rows rows_of(const Tensor& t) {
  return {t.data, t.stride[t.dims - 3], t.stride[t.dims - 2]};
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
  const StrategyInfo* strategy = nullptr;
  std::unique_ptr<kernels::Backend> kernels;
  std::optional<PhaseClock> clock;
  Buffer memory;
  Workspace workspace;
  std::size_t scratch_bytes = 0;

  Impl(const Communicator& communicator, const Options& given)
      : world(communicator), options(given) {
    agree(world, describe(options), "making of the layer");
    check_options(options);
    strategy = &choose_strategy(options, world.size());
    kernels = make_kernels(world, options.threads);
    kernels->check(bounds());
    if (options.profile) clock.emplace(kernels->timer(PhaseClock::kMarks));
    allocate();
  }

  /// The largest run that the options allow.
  kernels::AttendParams bounds() const {
    kernels::AttendParams p;
    p.dtype = options.dtype;
    p.tokens = options.max_tokens * (options.shard_queries ? world.size() : 1);
    p.heads = options.heads;
    p.kv_heads = options.kv_heads;
    p.dim = options.dim;
    p.batch.size = options.max_batch;
    p.shard.rank = world.rank();
    p.shard.ranks = world.size();
    p.mask = options.mask;
    p.score.scale = options.scale.value_or(1.0f / std::sqrt(static_cast<float>(options.dim)));
    p.score.softcap = options.softcap;
    p.invariant = options.invariant;
    return p;
  }

  std::int64_t row_bytes() const {
    return std::int64_t{options.heads} * options.dim *
           static_cast<std::int64_t>(size_of(options.dtype));
  }

  void allocate() {
    scratch_bytes = kernels->attend_scratch(bounds());
    const Workspace::Sizes sizes{world.size(),  options.max_tokens,   options.max_batch,
                                 options.heads, options.dim,          row_bytes(),
                                 scratch_bytes, options.shard_queries};
    std::size_t bytes = 0;
    Workspace::lay_out(nullptr, sizes, bytes);
    std::string failure;
    try {
      memory = Buffer(world.device(), bytes);
    } catch (const Error& error) {
      failure = error.what();
    }
    settle(world, failure, fmt::format("allocation of {} bytes of workspace", bytes));
    workspace = Workspace::lay_out(static_cast<std::byte*>(memory.data()), sizes, bytes);
  }

  kernels::AttendParams attend_params(const Request& request) const {
    kernels::AttendParams p = bounds();
    if (options.shard_queries) {
      p.tokens = request.query_shard.length;
      p.q = {workspace.ordered, std::int64_t{options.heads} * options.dim, options.dim};
    } else {
      p.tokens = request.q.shape[0];
      p.q = rows_of(request.q);
    }
    p.k = rows_of(request.k);
    p.v = rows_of(request.v);
    p.batch = {request.batch, request.query_start, request.kv_len,
               request.batch > 1 ? workspace.key_start : nullptr};
    p.shard = request.shard;
    p.state = {workspace.states, p.tokens * options.heads, options.dim, world.size()};
    p.slot = world.rank();
    p.scratch = workspace.scratch;
    p.scratch_bytes = scratch_bytes;
    return p;
  }

  kernels::MergeParams merge_params(const Request& request,
                                    const kernels::StateSlots& states) const {
    kernels::MergeParams p;
    p.states = states;
    p.interleaved = request.shard.layout == Layout::interleaved;
    p.heads = options.heads;
    p.sinks = request.sinks;
    p.tokens = request.q.shape[0];
    p.dtype = options.dtype;
    p.out = rows_of(request.out);
    if (request.lse) {
      p.lse = static_cast<float*>(request.lse.data);
      p.lse_row_stride = request.lse.stride[0];
      p.lse_head_stride = request.lse.stride[1];
    }
    return p;
  }

  Job job(const Request& request, Stream stream) {
    Job job{*kernels, world.transport(), stream, attend_params(request), {}};
    job.merge = merge_params(request, job.attend.state);
    job.enter = [this, stream](Phase phase) {
      if (clock) clock->mark(phase, stream);
    };
    if (!options.shard_queries) return job;

    // One sequence by a rule: every rank knows the most rows that any rank holds.
    const Shard& rows = request.query_shard;
    const bool counted = request.batch == 1 && rows.layout != Layout::listed &&
                         (rows.layout != Layout::ranges || world.device() == Device::host);
    job.shard_queries = true;
    job.query_shard = rows;
    job.own_q = static_cast<const std::byte*>(request.q.data);
    job.own_rows = request.q.shape[0];
    job.row_capacity = counted ? rows.max_local_len(rows.length) : options.max_tokens;
    job.row_bytes = row_bytes();
    job.gathered = workspace.gathered;
    job.ordered = workspace.ordered;
    job.row_map = workspace.row_map;
    job.merge.rows = workspace.row_map + world.rank() * job.row_capacity;
    return job;
  }
};

Attention::Attention(const Communicator& world, const Options& options)
    : impl_(std::make_unique<Impl>(world, options)) {}
Attention::~Attention() = default;
Attention::Attention(Attention&&) noexcept = default;
Attention& Attention::operator=(Attention&&) noexcept = default;

void Attention::run(const Request& request, Stream stream) {
  const trace::Range range("longspan run");
  check_request(request, impl_->options, impl_->world);
  Job job = impl_->job(request, stream);
  impl_->kernels->check(job.attend);
  if (impl_->clock) impl_->clock->restart();
  if (request.batch > 1) {
    const Tensor& k = request.k;
    const std::int64_t capacity = k.dims == 4 ? k.stride[0] / k.stride[1] : 0;
    impl_->kernels->key_starts(
        {request.shard, request.kv_len, capacity, request.batch, impl_->workspace.key_start},
        stream);
  }
  run_of (*impl_->strategy)(job);
  job.enter(Phase::merge);  // the end of the last phase
}

void Attention::wait(Stream stream) { impl_->world.transport().wait(stream, "attention"); }

const Options& Attention::options() const { return impl_->options; }
const Communicator& Attention::world() const { return impl_->world; }
const StrategyInfo& Attention::strategy() const { return *impl_->strategy; }
std::size_t Attention::workspace_bytes() const { return impl_->memory.bytes(); }

Phases Attention::phases() const { return impl_->clock ? impl_->clock->read() : Phases{}; }

void attend(const Communicator& world, const Request& request, Options options) {
  const Tensor& q = request.q;
  options.heads = static_cast<int>(q.shape[1]);
  options.kv_heads = static_cast<int>(request.k.shape[request.k.dims - 2]);
  options.dim = static_cast<int>(q.shape[2]);
  options.dtype = q.dtype;
  options.max_batch = request.batch;
  options.max_tokens = q.shape[0];
  if (options.shard_queries) {
    options.max_tokens = 0;
    for (const std::string& rows : world.gather(std::to_string(q.shape[0]), "count of query rows"))
      options.max_tokens = std::max<std::int64_t>(options.max_tokens, std::stoll(rows));
  }
  agree(world, describe(request, options.shard_queries), "attend");
  Attention layer(world, options);
  layer.run(request);
  layer.wait();
}

}  // namespace longspan
