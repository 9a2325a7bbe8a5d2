#include "comm/nccl/receive_buffer.hpp"

#include <algorithm>
#include <cstddef>
#include <future>
#include <system_error>
#include <thread>
#include <utility>

#include "comm/cuda/stream.hpp"
#include "comm/cuda/stream_flags.hpp"
#include "comm/nccl/failures.hpp"
#include "src/base/check.hpp"
#include "src/base/device_guard.hpp"

namespace longspan::comm {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::size_t kFlagBytes = 8;
constexpr std::size_t kShiftFlags = 2 * std::size_t{PeerView::kMostRanks};
// An abort frees these, and the counters of PutFlags that others increment.
constexpr std::size_t kFlags = kShiftFlags + offsetof(PutFlags, runs) / kFlagBytes;

std::size_t place_of_flags(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}
std::size_t place_of_put_flags(std::size_t bytes) {
  return place_of_flags(bytes) + kShiftFlags * kFlagBytes;
}

}  // namespace

std::shared_ptr<ReceiveBuffer> ReceiveBuffer::open(Transport& world, std::size_t bytes,
                                                   std::string& why,
                                                   std::shared_ptr<PeerBufferSet> set) {
  auto buffers =
      PeerBuffers::open(world, place_of_put_flags(bytes) + sizeof(PutFlags), why, std::move(set));
  if (!buffers) return nullptr;
  const std::shared_ptr<ReceiveBuffer> buffer(
      new ReceiveBuffer(std::move(buffers), bytes, world.deadline()));
  why = first_failure(
      world.gather(failure_of([&] { buffer->prepare(); }), "opening of the receive buffers"));
  return why.empty() ? buffer : nullptr;
}

/// This rank's flags as an abort sees them, and a stream that never waits.
struct ReceiveBuffer::OwnFlags {
  std::byte* first = nullptr;
  int device = 0;
  cudaStream_t stream = nullptr;

  OwnFlags() = default;
  ~OwnFlags() {
    if (stream != nullptr) static_cast<void>(LONGSPAN_CUDA_WORKED(cudaStreamDestroy(stream)));
  }
  OwnFlags(const OwnFlags&) = delete;
  OwnFlags& operator=(const OwnFlags&) = delete;

  /// Makes the stream, and checks that flags work in it.
  void prepare() {
    LONGSPAN_CUDA(cudaGetDevice(&device));
    LONGSPAN_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    queue_flags(stream, {{FlagOperation::raise, first},  // of distance 0: nobody else has it
                         {FlagOperation::wait, first},
                         {FlagOperation::lower, first}});
    LONGSPAN_CUDA(cudaStreamSynchronize(stream));
  }

  /// Ends every wait for these flags, of now and of later.
  void free() const noexcept {
    if (stream == nullptr) return;
    try {
      const DeviceGuard guard(device);
      for (std::size_t i = 0; i < kFlags; ++i)
        queue_flags(stream, {{FlagOperation::free, first + i * kFlagBytes}});
    } catch (...) {  // a GPU that accepts no work waits for nothing either
    }
  }
};

ReceiveBuffer::ReceiveBuffer(std::unique_ptr<PeerBuffers> buffers, std::size_t bytes,
                             std::chrono::milliseconds deadline)
    : buffers_(std::move(buffers)),
      bytes_(bytes),
      deadline_(deadline),
      own_(std::make_shared<OwnFlags>()) {
  own_->first = flag(Flag::free, rank(), 0);
}

void ReceiveBuffer::prepare() {
  own_->prepare();
  const std::uint32_t* const abort = buffers_->view().abort;
  LONGSPAN_CUDA(
      cudaMemcpy(&put_ranks().flags[rank()]->abort, &abort, sizeof abort, cudaMemcpyHostToDevice));
  buffers_->on_abort([own = own_] { own->free(); });
}

/// A timer frees a stream that waits for a missing peer: a graph that repeats has no other watch
/// here.
ReceiveBuffer::~ReceiveBuffer() {
  const DeviceGuard guard(own_->device);
  std::promise<void> done;
  std::thread clock;
  try {
    clock = std::thread([&, end = done.get_future()] {
      if (end.wait_for(deadline_) == std::future_status::timeout) buffers_->abort();
    });
  } catch (const std::system_error&) {  // no thread: then the wait has no limit
  }
  static_cast<void>(LONGSPAN_CUDA_WORKED(cudaDeviceSynchronize()));
  done.set_value();
  if (clock.joinable()) clock.join();
}

bool ReceiveBuffer::holds(const void* memory) const {
  const auto* const at = static_cast<const std::byte*>(memory);
  return at >= data() && at < data() + bytes_;
}

std::byte* ReceiveBuffer::flag(Flag which, int rank, int distance) const {
  const std::size_t index = 2 * static_cast<std::size_t>(distance) + (which == Flag::here ? 1 : 0);
  return base(rank) + place_of_flags(bytes_) + index * kFlagBytes;
}

PutRanks ReceiveBuffer::put_ranks() const {
  PutRanks among{.rank = rank(), .ranks = ranks()};
  for (int p = 0; p < ranks(); ++p)
    among.flags[p] = reinterpret_cast<PutFlags*>(base(p) + place_of_put_flags(bytes_));
  return among;
}

void ReceiveBuffer::shift(std::span<const Piece> pieces, int distance, cudaStream_t stream) const {
  const int to = (rank() + distance) % ranks(), from = (rank() - distance + ranks()) % ranks();
  const auto moves = [&](std::size_t Piece::*bytes) {
    return std::any_of(pieces.begin(), pieces.end(), [&](const Piece& p) { return p.*bytes > 0; });
  };
  const bool receives = moves(&Piece::received);
  if (receives) queue_flags(stream, {{FlagOperation::raise, flag(Flag::free, from, distance)}});
  if (moves(&Piece::sent)) {
    std::byte* const freed = flag(Flag::free, rank(), distance);
    queue_flags(stream, {{FlagOperation::wait, freed}, {FlagOperation::lower, freed}});
    for (const Piece& piece : pieces) {
      const void* const place = piece.place_there ? piece.place_there : piece.recv;
      copy_on(stream, piece.send, place_at(place, to), piece.sent);
    }
    queue_flags(stream, {{FlagOperation::raise, flag(Flag::here, to, distance)}});
  }
  if (receives) {
    std::byte* const here = flag(Flag::here, rank(), distance);
    queue_flags(stream, {{FlagOperation::wait, here}, {FlagOperation::lower, here}});
  }
}

}  // namespace longspan::comm
