// Resharding of a cache. Keys are packed side by side, the keys for one rank together. Each part is
// sent to its rank, which writes the received keys to their places.
//
//     old cache -> rows           one kernel; those of part d are for rank + d
//     part d    -> rank + d       a shift by each distance d, all at once
//     part d    -> new cache      a kernel for each distance; part 0 stayed on this rank
//
// What each rank reports of the run is sent before the keys; if the reports differ, nothing is
// written.
#include "longspan/reshard.hpp"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>

#include "comm/transport.hpp"
#include "kernels/backend.hpp"
#include "longspan/buffer.hpp"
#include "longspan/storage.hpp"
#include "src/agreement/agreed_runs.hpp"
#include "src/agreement/agreement.hpp"
#include "src/base/device_guard.hpp"
#include "src/base/trace.hpp"
#include "src/layer/layer_memory.hpp"
#include "src/reshard/check_reshard.hpp"
#include "src/reshard/reshard_plan.hpp"

namespace longspan {
namespace {

constexpr const char* kStep = "reshard";

/// Options with resolved numbers of ranks; check_options refuses an invalid first rank.
ReshardOptions resolved(ReshardOptions o, int ranks) {
  for (CacheRanks* cache : {&o.from, &o.to})
    if (cache->ranks == 0 && cache->first_rank >= 0) cache->ranks = ranks - cache->first_rank;
  return o;
}

template <class T>
Buffer uploaded(Device device, const std::vector<T>& values) {
  Buffer buffer(device, values.size() * sizeof(T));
  if (!values.empty()) buffer.upload(values.data());
  return buffer;
}

/// One side of the plan, in memory that kernels read.
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
  std::vector<std::string> steps;         // [ranks] names of the comparison and of the shifts
  std::vector<comm::Transfer> transfers;  // [ranks]
  std::optional<AgreedRuns> agreed;

  Impl(const Communicator& communicator, const ReshardOptions& asked)
      : world(communicator),
        given(asked),
        options(resolved(asked, world.size())),
        memory(world),
        transfers(static_cast<std::size_t>(world.size())) {
    const DeviceGuard guard(world.gpu());
    agreed.emplace(world, kStep, describe(options));
    check_options(options, world.size());
    kernels = make_kernels(world, options.threads);
    plan = plan_reshard(options, world.rank(), world.size());
    memory.allocate([this](Parts& parts) { lay_out(parts); }, [this] { upload_plan(); });
    name_steps();
  }

  void lay_out(Parts& parts) {
    rows = parts.take(bytes_of(plan.rows));
    agreed->lay_out(parts);
  }

  /// The names contain the number of the reshard, so that an error shows which one a rank is in.
  void name_steps() {
    const std::uint32_t layer = agreed->layer();
    steps.push_back(fmt::format("{} of layer {}, agreement", kStep, layer));
    for (int d = 1; d < world.size(); ++d)
      steps.push_back(
          fmt::format("{} of layer {}, distance {} of {}", kStep, layer, d, world.size() - 1));
  }

  void upload_plan() {
    agreed->allocate(*kernels, false);
    leaving = SideMemory(world.device(), plan.leaving);
    arriving = SideMemory(world.device(), plan.arriving);
  }

  std::int64_t row_elements() const {
    const StorageFormat format = storage_of(options.dtype);
    return std::int64_t{options.kv_heads} *
           (format.row_elements(options.head_dim) + format.row_elements(options.of_values()));
  }
  std::size_t bytes_of(std::int64_t count) const {
    return static_cast<std::size_t>(storage_of(options.dtype).bytes(count * row_elements()));
  }
  std::byte* at(std::int64_t row) const { return rows + bytes_of(row); }

  /// The rows in the buffer.
  kernels::KeyStore travelling() const {
    const std::int64_t keys = std::int64_t{options.kv_heads} * options.head_dim;
    kernels::KeyStore store;
    store.k = {rows, options.dtype, options.kv_heads, options.head_dim};
    store.k.row_stride = row_elements();
    if (options.of_values() > 0)
      store.v = {rows + storage_of(options.dtype).bytes(keys), row_elements(), options.of_values()};
    return store;
  }

  /// Moves the keys of `count` runs of a list.
  void move(const Buffer& runs, std::int64_t first, std::int64_t count,
            const kernels::KeyStore& from, const kernels::KeyStore& to, Stream stream,
            const kernels::RunHeaders& headers = {}) const {
    kernels->move_keys({.from = from,
                        .to = to,
                        .runs = static_cast<const kernels::KeyRun*>(runs.data()) + first,
                        .count = count,
                        .dtype = options.dtype,
                        .kv_heads = options.kv_heads,
                        .head_dim = options.head_dim,
                        .value_dim = options.of_values(),
                        .headers = headers},
                       stream);
  }

  /// Writes the keys of a part, if the ranks' reports of the run are equal.
  void unpack(int d, const kernels::KeyStore& to, const kernels::RunHeaders& headers,
              Stream stream) const {
    const ReshardPlan::Part& part = plan.arriving.parts[d];
    move(arriving.runs, part.first_run, part.runs, travelling(), to, stream, headers);
  }

  void start_transfer(int d, Stream stream) {
    const ReshardPlan::Part &out = plan.leaving.parts[d], &in = plan.arriving.parts[d];
    transfers[d] = comm::transport_of(world).start_shift(at(out.first_row), bytes_of(out.rows),
                                                         at(in.first_row), bytes_of(in.rows), d,
                                                         stream, steps[d].c_str());
  }

  void pack(const kernels::KeyStore& from, Stream stream) const {
    move(leaving.runs, 0, static_cast<std::int64_t>(plan.leaving.runs.size()), from, travelling(),
         stream);
  }

  void run(const kernels::KeyStore& from, const kernels::KeyStore& to, Stream stream) {
    pack(from, stream);
    if (world.size() == 1) return unpack(0, to, {}, stream);
    const AgreedRuns::Begun begun = agreed->begin({}, stream);
    kernels->write_run_digest(begun.own_digest, stream);
    comm::Transfer word =
        comm::transport_of(world).start_compare(begun.digests, stream, steps[0].c_str());
    for (int d = 1; d < world.size(); ++d) start_transfer(d, stream);
    word.wait(stream);
    unpack(0, to, begun.headers, stream);
    for (int d = 1; d < world.size(); ++d) {
      transfers[d].wait(stream);
      unpack(d, to, begun.headers, stream);
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
  impl_->agreed->check();
  impl_->run(from, to, stream);
}

void Reshard::wait(Stream stream) {
  const DeviceGuard guard(impl_->world.gpu());
  comm::transport_of(impl_->world).wait(stream, kStep);
  impl_->agreed->check();
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
