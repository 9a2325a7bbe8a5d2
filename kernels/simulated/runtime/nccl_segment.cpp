#include "kernels/simulated/runtime/nccl_segment.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>

namespace longspan::simulated {
namespace {

constexpr std::size_t kRingBytes = 64 << 10;
constexpr std::uint32_t kSplits = 16;            // most splits by which ranks may be apart
constexpr std::int64_t kLookEvery = 10'000'000;  // ns

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// A zombie, which its parent has not waited for, does not count as alive either.
bool is_alive(int process) {
  if (kill(process, 0) != 0 && errno == ESRCH) return false;
  char path[32], text[256] = "";
  std::snprintf(path, sizeof path, "/proc/%d/stat", process);
  std::FILE* const file = std::fopen(path, "r");
  if (file == nullptr) return false;
  text[std::fread(text, 1, sizeof text - 1, file)] = '\0';
  std::fclose(file);
  const char* const state = std::strrchr(text, ')');
  return state == nullptr || state[1] == '\0' || (state[2] != 'Z' && state[2] != 'X');
}

}  // namespace

struct Segment::Member {
  struct Slot {
    std::atomic<std::uint32_t> split;  // counted from 1
    Announcement announced;
  };
  std::atomic<int> process;
  std::atomic<State> state;
  std::atomic<int> gpu;
  Slot splits[kSplits];
};

/// One writer and one reader. All zero at first.
struct Segment::Ring {
  std::atomic<std::uint64_t> written, read;
  std::byte data[kRingBytes];
};

struct Segment::Layout {
  static std::size_t members(int size) {
    return (sizeof(Member) * static_cast<std::size_t>(size) + 4095) / 4096 * 4096;
  }
  static std::size_t bytes(int size) {
    return members(size) + sizeof(Ring) * static_cast<std::size_t>(size * size);
  }
};

std::string fresh_segment_name() {
  std::random_device random;
  char text[64];
  std::snprintf(text, sizeof text, "/longspan-nccl-%d-%08x%08x", getpid(), random(), random());
  return text;
}

Segment::Segment(std::string name, int rank, int size, void* memory)
    : name_(std::move(name)), rank_(rank), size_(size), memory_(memory) {}

std::shared_ptr<Segment> Segment::open(const std::string& name, int rank, int size, int gpu) {
  const int file = shm_open(name.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0) return nullptr;
  const std::size_t bytes = Layout::bytes(size);
  void* memory = MAP_FAILED;
  if (ftruncate(file, static_cast<off_t>(bytes)) == 0)
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return nullptr;
  std::shared_ptr<Segment> segment(new Segment(name, rank, size, memory));
  Member& own = segment->member(rank);
  int nobody = 0;
  if (!own.process.compare_exchange_strong(nobody, getpid())) return nullptr;
  own.gpu = gpu;
  own.state = State::here;
  if (segment->are_all_here()) shm_unlink(name.c_str());  // all of them have mapped it
  return segment;
}

Segment::~Segment() { munmap(memory_, Layout::bytes(size_)); }

Segment::Member& Segment::member(int rank) const { return static_cast<Member*>(memory_)[rank]; }

Segment::Ring& Segment::ring(int from, int to) const {
  auto* const first = static_cast<std::byte*>(memory_) + Layout::members(size_);
  return reinterpret_cast<Ring*>(first)[from * size_ + to];
}

bool Segment::are_all_here() const {
  for (int r = 0; r < size_; ++r)
    if (member(r).state == State::absent) return false;
  return true;
}

bool Segment::have_all_left() const {
  for (int r = 0; r < size_; ++r)
    if (member(r).state != State::left) return false;
  return true;
}

bool Segment::has_other_processes() const {
  for (int r = 0; r < size_; ++r)
    if (member(r).process != getpid()) return true;
  return false;
}

bool Segment::shares_a_gpu() const {
  for (int r = 0; r < size_; ++r)
    for (int other = 0; other < r; ++other)
      if (member(r).gpu == member(other).gpu) return true;
  return false;
}

bool Segment::has_lost_a_rank() {
  if (now() - looked_ns_ < kLookEvery) return false;
  looked_ns_ = now();
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && member(r).state == State::here && member(r).process != getpid() &&
        !is_alive(member(r).process))
      return true;
  return false;
}

void Segment::leave(State how) {
  if (!are_all_here()) shm_unlink(name_.c_str());  // it will never be complete
  member(rank_).state = how;
}

void Segment::announce(std::uint32_t split, Announcement announced) {
  Member::Slot& slot = member(rank_).splits[split % kSplits];
  slot.announced = announced;
  slot.split = split;
}

bool Segment::has_announced(int rank, std::uint32_t split, Announcement& announced) const {
  const Member::Slot& slot = member(rank).splits[split % kSplits];
  if (slot.split != split) return false;
  announced = slot.announced;
  return true;
}

std::size_t Segment::send(int to, const std::byte* data, std::size_t bytes) {
  Ring& r = ring(rank_, to);
  const std::uint64_t at = r.written;
  const std::size_t count = std::min(bytes, kRingBytes - static_cast<std::size_t>(at - r.read));
  const std::size_t first = std::min(count, kRingBytes - at % kRingBytes);
  std::memcpy(r.data + at % kRingBytes, data, first);
  std::memcpy(r.data, data + first, count - first);
  r.written = at + count;
  return count;
}

std::size_t Segment::receive(int from, std::byte* data, std::size_t bytes) {
  Ring& r = ring(from, rank_);
  const std::uint64_t at = r.read;
  const std::size_t count = std::min(bytes, static_cast<std::size_t>(r.written - at));
  const std::size_t first = std::min(count, kRingBytes - at % kRingBytes);
  std::memcpy(data, r.data + at % kRingBytes, first);
  std::memcpy(data + first, r.data, count - first);
  r.read = at + count;
  return count;
}

}  // namespace longspan::simulated
