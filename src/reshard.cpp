// Resharding of a cache. Keys are packed side by side, the keys for one rank together; each part
// goes to its rank, and what comes is written where it belongs.
//
//     old cache -> rows           one kernel; those of part d are for rank + d
//     part d    -> rank + d       a shift by each distance d, all at once
//     part d    -> new cache      a kernel for each distance; part 0 has not travelled
#include "longspan/reshard.hpp"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "comm/transport.hpp"
#include "kernels/backend.hpp"
#include "longspan/buffer.hpp"
#include "src/check_reshard.hpp"
#include "src/device_guard.hpp"
#include "src/layer_memory.hpp"
#include "src/reshard_plan.hpp"
#include "src/trace.hpp"

namespace longspan {
namespace {

constexpr const char* kStep = "reshard";

/// Options with the numbers of ranks that their defaults stand for.
ReshardOptions resolved(ReshardOptions o, int ranks) {
  for (CacheRanks* cache : {&o.from, &o.to})
    if (cache->ranks == 0) cache->ranks = ranks - cache->first_rank;
  return o;
}

/// The log of runs that differ in nothing that ranks must give alike.
struct PlainLog final : comm::RunLog {
  NamedValues describe(std::uint32_t) const override { return {}; }
};

template <class T>
Buffer uploaded(Device device, const std::vector<T>& values) {
  Buffer buffer(device, values.size() * sizeof(T));
  if (!values.empty()) buffer.upload(values.data());
  return buffer;
}

/// One side of the plan, where kernels read it.
struct SideMemory {
  Buffer runs, start;

  SideMemory() = default;
  SideMemory(Device device, const ReshardPlan::Side& side)
      : runs(uploaded(device, side.runs)), start(uploaded(device, side.start)) {}
  std::size_t bytes() const { return runs.bytes() + start.bytes(); }
};

}  // namespace

struct Reshard::Impl {
  Communicator world;
  ReshardOptions given, options;
  std::unique_ptr<kernels::Backend> kernels;
  ReshardPlan plan;
  SideMemory leaving, arriving;
  LayerMemory memory;
  std::byte* rows = nullptr;              // [plan.rows] the keys of all heads, then their values
  std::vector<std::string> steps;         // [ranks] names of the shifts
  std::vector<comm::Transfer> transfers;  // [ranks]
  std::uint32_t layer = 0, last_run = 0;

  Impl(const Communicator& communicator, const ReshardOptions& asked)
      : world(communicator),
        given(asked),
        options(resolved(asked, world.size())),
        memory(world),
        transfers(static_cast<std::size_t>(world.size())) {
    const DeviceGuard guard(world.gpu());
    agree(world, describe(options), "making of the reshard");
    check_options(options, world.size());
    kernels = make_kernels(world, options.threads);
    for (int d = 0; d < world.size(); ++d)
      steps.push_back(fmt::format("{}, distance {} of {}", kStep, d, world.size() - 1));
    plan = plan_reshard(options, world.rank(), world.size());
    memory.allocate([this](Parts& parts) { lay_out(parts); }, [this] { upload_plan(); });
    layer = comm::transport_of(world).enlist(std::make_shared<PlainLog>());
  }

  void lay_out(Parts& parts) { rows = parts.take(bytes_of(plan.rows)); }

  void upload_plan() {
    leaving = SideMemory(world.device(), plan.leaving);
    arriving = SideMemory(world.device(), plan.arriving);
  }

  std::int64_t row_elements() const {
    return std::int64_t{options.kv_heads} * (options.head_dim + options.of_values());
  }
  std::size_t bytes_of(std::int64_t count) const {
    return static_cast<std::size_t>(count * row_elements()) * size_of(options.dtype);
  }
  std::byte* at(std::int64_t row) const { return rows + bytes_of(row); }

  /// Rows as they travel.
  kernels::KeyStore travelling() const {
    const int keys = options.kv_heads * options.head_dim;
    kernels::KeyStore store;
    store.k = {rows, row_elements(), options.head_dim};
    if (options.of_values() > 0)
      store.v = {rows + static_cast<std::size_t>(keys) * size_of(options.dtype), row_elements(),
                 options.of_values()};
    return store;
  }

  /// Moves the keys of so many runs of a list.
  void move(const Buffer& runs, std::int64_t first, std::int64_t count,
            const kernels::KeyStore& from, const kernels::KeyStore& to, Stream stream) const {
    if (count == 0) return;
    kernels->move_keys({.from = from,
                        .to = to,
                        .runs = static_cast<const kernels::KeyRun*>(runs.data()) + first,
                        .count = count,
                        .dtype = options.dtype,
                        .kv_heads = options.kv_heads,
                        .head_dim = options.head_dim,
                        .value_dim = options.of_values()},
                       stream);
  }

  void unpack(int d, const kernels::KeyStore& to, Stream stream) const {
    const ReshardPlan::Part& part = plan.arriving.parts[d];
    move(arriving.runs, part.first_run, part.runs, travelling(), to, stream);
  }

  void start_transfer(int d, Stream stream) {
    const ReshardPlan::Part &out = plan.leaving.parts[d], &in = plan.arriving.parts[d];
    transfers[d] = comm::transport_of(world).start_shift(at(out.first_row), bytes_of(out.rows),
                                                         at(in.first_row), bytes_of(in.rows), d,
                                                         stream, steps[d].c_str());
  }

  void run(const kernels::KeyStore& from, const kernels::KeyStore& to, Stream stream) {
    comm::transport_of(world).begin({layer, ++last_run});
    move(leaving.runs, 0, static_cast<std::int64_t>(plan.leaving.runs.size()), from, travelling(),
         stream);
    for (int d = 1; d < world.size(); ++d) start_transfer(d, stream);
    unpack(0, to, stream);
    for (int d = 1; d < world.size(); ++d) {
      transfers[d].wait(stream);
      unpack(d, to, stream);
    }
  }

  kernels::KeyStore view(const CacheTensors& cache, bool written) const {
    const ReshardPlan::Side& side = written ? plan.arriving : plan.leaving;
    const Buffer& start = written ? arriving.start : leaving.start;
    return view_cache(cache, options, side.keys, static_cast<const std::int64_t*>(start.data()),
                      world.device(), written, written ? "to" : "from");
  }
};

Reshard::Reshard(const Communicator& world, const ReshardOptions& options)
    : impl_(std::make_unique<Impl>(world, options)) {}
Reshard::~Reshard() = default;
Reshard::Reshard(Reshard&&) noexcept = default;
Reshard& Reshard::operator=(Reshard&&) noexcept = default;

void Reshard::run(const ReshardArgs& args, Stream stream) {
  const trace::Range range("longspan reshard");
  const DeviceGuard guard(impl_->world.gpu());
  const kernels::KeyStore from = impl_->view(args.from, false), to = impl_->view(args.to, true);
  impl_->run(from, to, stream);
}

void Reshard::wait(Stream stream) {
  const DeviceGuard guard(impl_->world.gpu());
  comm::transport_of(impl_->world).wait(stream, kStep);
}

const ReshardOptions& Reshard::options() const { return impl_->given; }
const Communicator& Reshard::world() const { return impl_->world; }

ReshardTraffic Reshard::traffic() const {
  const ReshardPlan& plan = impl_->plan;
  ReshardTraffic traffic{.kept = impl_->bytes_of(plan.leaving.parts[0].rows)};
  for (int d = 1; d < impl_->world.size(); ++d) {
    traffic.sent += impl_->bytes_of(plan.leaving.parts[d].rows);
    traffic.received += impl_->bytes_of(plan.arriving.parts[d].rows);
  }
  return traffic;
}

std::size_t Reshard::workspace_bytes() const {
  return impl_->memory.bytes() + impl_->leaving.bytes() + impl_->arriving.bytes();
}

}  // namespace longspan
