#include "comm/nccl/peer_buffers.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <utility>

#include "comm/control/hosts.hpp"
#include "comm/control/wire.hpp"
#include "comm/nccl/failures.hpp"
#include "src/base/check.hpp"
#include "src/base/device_guard.hpp"

namespace longspan::comm {
namespace {

/// The part of the deadline that a kernel waits; the rest is left for the roll call that names the
/// missing rank.
constexpr double kKernelShare = 0.5;

/// The words that both the device and the host see.
struct Shared {
  std::uint64_t report;
  std::uint32_t abort;
};

std::string bus_of(int device) {
  std::array<char, 32> bus{};
  LONGSPAN_CUDA(cudaDeviceGetPCIBusId(bus.data(), bus.size(), device));
  return bus.data();
}

/// Throws where GPU `own` cannot write the memory of the GPU at `bus`.
void check_reach(int own, const std::string& bus) {
  int other = 0, reaches = 0;
  if (!LONGSPAN_CUDA_WORKED(cudaDeviceGetByPCIBusId(&other, bus.c_str())))
    throw Unsupported(
        fmt::format("the GPU at {} is not visible to every process of the node", bus));
  LONGSPAN_CUDA(cudaDeviceCanAccessPeer(&reaches, own, other));
  if (!reaches) throw Unsupported(fmt::format("no peer access to the GPU at {}", bus));
}

std::vector<std::string> part(const std::vector<std::string>& texts, std::size_t index) {
  std::vector<std::string> parts;
  parts.reserve(texts.size());
  for (const std::string& text : texts) parts.push_back(unpack(text).at(index));
  return parts;
}

std::uint64_t fresh_nonce() {
  std::random_device random;
  return std::uint64_t{random()} << 32 | random();
}

template <class T>
std::string bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

template <class T>
T from_bytes(const std::string& bytes) {
  if (bytes.size() != sizeof(T))
    throw Error(ErrorKind::internal,
                fmt::format("a rank sent {} bytes where {} were due", bytes.size(), sizeof(T)));
  T value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

/// The place of the nonce: behind the peer buffer, since a peer buffer is 0 at rest.
std::size_t place_of_nonce(std::size_t bytes) { return (bytes + 7) / 8 * 8; }

void free_memory(void* memory) noexcept {
  if (memory != nullptr) static_cast<void>(LONGSPAN_CUDA_WORKED(cudaFree(memory)));
}

}  // namespace

// ---- the set -----------------------------------------------------------------------------------

void PeerBufferSet::abort() noexcept {
  const std::lock_guard lock(mutex_);
  failed_ = true;
  for (PeerBuffers* peer_buffers : open_) peer_buffers->set_abort_word();
  for (PeerBuffers* peer_buffers : open_) peer_buffers->abort();  // which may wait for the driver
}

bool PeerBufferSet::failed() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

void PeerBufferSet::end(bool together) noexcept {
  const std::lock_guard lock(mutex_);
  if (together && !failed_)
    for (const Remains& left : remains_) free_memory(left.memory);
  remains_.clear();
}

std::string PeerBufferSet::closed() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint32_t> numbers;
  for (const Remains& left : remains_) numbers.push_back(left.number);
  return fmt::format("{}", fmt::join(numbers, ","));
}

void PeerBufferSet::free_what_all_closed(const std::vector<std::string>& closed) noexcept {
  const std::lock_guard lock(mutex_);
  if (failed_) return;
  const auto has = [](const std::string& numbers, std::uint32_t number) {
    return fmt::format(",{},", numbers).find(fmt::format(",{},", number)) != std::string::npos;
  };
  std::erase_if(remains_, [&](const Remains& left) {
    const bool by_all = std::all_of(closed.begin(), closed.end(), [&](const std::string& numbers) {
      return has(numbers, left.number);
    });
    if (by_all) free_memory(left.memory);
    return by_all;
  });
}

// ---- opening -----------------------------------------------------------------------------------

PeerBuffers::PeerBuffers(std::shared_ptr<PeerBufferSet> set) : set_(std::move(set)) {
  const std::lock_guard lock(set_->mutex_);
  number_ = ++set_->opened_;
  set_->open_.push_back(this);
}

/// Allocates this rank's peer buffer and, behind it, the nonce that identifies it.
void PeerBuffers::allocate(std::uint64_t nonce) {
  const std::size_t place = place_of_nonce(view_.bytes);
  std::byte*& own = view_.peer_buffer[view_.rank];
  LONGSPAN_CUDA(cudaMalloc(reinterpret_cast<void**>(&own), place + sizeof nonce));
  LONGSPAN_CUDA(cudaMemset(own, 0, place));
  LONGSPAN_CUDA(cudaMemcpy(own + place, &nonce, sizeof nonce, cudaMemcpyDefault));
  LONGSPAN_CUDA(cudaDeviceSynchronize());
}

/// Maps the peer buffer of a rank. A handle may open other memory, as between containers that see
/// other GPUs under the same names: the nonce shows whose memory it is.
void PeerBuffers::map(int rank, const std::string& handle, std::uint64_t nonce) {
  void* mapped = nullptr;
  LONGSPAN_CUDA(cudaIpcOpenMemHandle(&mapped, from_bytes<cudaIpcMemHandle_t>(handle),
                                     cudaIpcMemLazyEnablePeerAccess));
  view_.peer_buffer[rank] = static_cast<std::byte*>(mapped);
  std::uint64_t found = 0;
  LONGSPAN_CUDA(cudaMemcpy(&found, view_.peer_buffer[rank] + place_of_nonce(view_.bytes),
                           sizeof found, cudaMemcpyDefault));
  if (found != nonce)
    throw Unsupported(
        fmt::format("what is mapped as the peer buffer of rank {} is other memory", rank));
}

/// Makes the kernels' other memory: the epoch, and words that the host sees too.
void PeerBuffers::make_words() {
  Shared* shared = nullptr;
  LONGSPAN_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&shared), sizeof(Shared),
                              cudaHostAllocPortable | cudaHostAllocMapped));
  *shared = {};
  report_ = &shared->report;
  abort_ = &shared->abort;
  constexpr std::size_t kEpochBytes = 2 * sizeof(std::uint32_t);
  LONGSPAN_CUDA(cudaMalloc(reinterpret_cast<void**>(&view_.epoch), kEpochBytes));
  LONGSPAN_CUDA(cudaMemset(view_.epoch, 0, kEpochBytes));
  LONGSPAN_CUDA(cudaDeviceSynchronize());
  Shared* seen = nullptr;
  LONGSPAN_CUDA(cudaHostGetDevicePointer(reinterpret_cast<void**>(&seen), shared, 0));
  view_.report = &seen->report;
  view_.abort = &seen->abort;
}

// A failure on one rank travels with the next exchange of the ranks, and all act alike.
std::unique_ptr<PeerBuffers> PeerBuffers::open(Transport& world, std::size_t bytes,
                                               std::string& why,
                                               std::shared_ptr<PeerBufferSet> set) {
  why.clear();
  const int ranks = world.size(), rank = world.rank();
  if (ranks < 2 || ranks > PeerView::kMostRanks) {
    why = fmt::format("{} ranks; peer buffers serve 2 to {}", ranks, PeerView::kMostRanks);
    return nullptr;
  }
  std::unique_ptr<PeerBuffers> peer_buffers(new PeerBuffers(set));
  PeerView& view = peer_buffers->view_;
  view.rank = rank;
  view.ranks = ranks;
  view.bytes = bytes;
  view.deadline_ns = static_cast<std::uint64_t>(kKernelShare * 1e6 *
                                                static_cast<double>(world.deadline().count()));

  std::string bus;
  std::string failure = failure_of([&] {
    LONGSPAN_CUDA(cudaGetDevice(&peer_buffers->device_));
    bus = bus_of(peer_buffers->device_);
  });
  const auto places = world.gather(pack(failure, this_host(), bus, set->closed()),
                                   "where the peer buffers would be");
  set->free_what_all_closed(part(places, 3));
  why = first_failure(part(places, 0));
  const auto hosts = part(places, 1), buses = part(places, 2);
  for (int p = 0; p < ranks && why.empty(); ++p)
    if (hosts[p] != hosts[0]) why = fmt::format("rank {} is on another node than rank 0", p);
  if (!why.empty()) return nullptr;

  cudaIpcMemHandle_t handle{};
  const std::uint64_t nonce = fresh_nonce();
  failure = failure_of([&] {
    for (int p = 0; p < ranks; ++p)
      if (p != rank) check_reach(peer_buffers->device_, buses[p]);
    peer_buffers->allocate(nonce);
    LONGSPAN_CUDA(cudaIpcGetMemHandle(&handle, view.peer_buffer[rank]));
  });
  peer_buffers->shared_ = failure.empty();
  const auto answers =
      world.gather(pack(failure, bytes_of(handle), bytes_of(nonce)), "handles of the peer buffers");
  why = first_failure(part(answers, 0));
  if (!why.empty()) {
    peer_buffers->shared_ = false;  // no rank opens the handles it was given
    return nullptr;
  }

  const auto handles = part(answers, 1), nonces = part(answers, 2);
  failure = failure_of([&] {
    for (int p = 0; p < ranks; ++p)
      if (p != rank) peer_buffers->map(p, handles[p], from_bytes<std::uint64_t>(nonces[p]));
    peer_buffers->make_words();
  });
  why = first_failure(world.gather(failure, "opening of the peer buffers"));
  if (why.empty()) return peer_buffers;
  peer_buffers.reset();
  set->free_what_all_closed(world.gather(set->closed(), "closing of the peer buffers"));
  return nullptr;
}

// ---- the end -----------------------------------------------------------------------------------

PeerReport PeerBuffers::report() const {
  if (report_ == nullptr) return {};
  return PeerReport::of(std::atomic_ref(*report_).load(std::memory_order_acquire));
}

void PeerBuffers::set_abort_word() noexcept {
  aborted_ = true;
  if (abort_ != nullptr) std::atomic_ref(*abort_).store(1, std::memory_order_release);
}

void PeerBuffers::abort() noexcept {
  set_abort_word();
  if (on_abort_) on_abort_();
}

/// Whether the GPU's work is done without a failed exchange, also one not reported yet.
bool PeerBuffers::is_quiet() const noexcept {
  return LONGSPAN_CUDA_WORKED(cudaDeviceSynchronize()) && report().kind == PeerReport::none;
}

bool PeerBuffers::close_mappings() noexcept {
  bool all = true;
  for (int p = 0; p < view_.ranks; ++p)
    if (p != view_.rank && view_.peer_buffer[p] != nullptr)
      all = LONGSPAN_CUDA_WORKED(cudaIpcCloseMemHandle(view_.peer_buffer[p])) && all;
  return all;
}

PeerBuffers::~PeerBuffers() {
  bool keep = aborted_;
  {
    const std::lock_guard lock(set_->mutex_);
    std::erase(set_->open_, this);
    keep = keep || set_->failed_;
  }
  const DeviceGuard guard(device_);
  if (keep || !is_quiet()) {  // a peer may still write, and this rank's mappings stay too
    abort();
    const std::lock_guard lock(set_->mutex_);
    set_->failed_ = true;
    return;
  }
  std::byte* const own = view_.peer_buffer[view_.rank];
  const bool closed = close_mappings();
  free_memory(view_.epoch);
  if (report_ != nullptr) static_cast<void>(LONGSPAN_CUDA_WORKED(cudaFreeHost(report_)));
  if (!shared_) free_memory(own);
  if (!shared_ || !closed) return;  // what is not closed must not be reported as closed
  try {
    const std::lock_guard lock(set_->mutex_);
    set_->remains_.push_back({number_, own});
  } catch (...) {  // without memory for the note, the process keeps the buffer
  }
}

}  // namespace longspan::comm
