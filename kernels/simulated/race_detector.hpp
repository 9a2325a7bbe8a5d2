// The machine's annotations for ThreadSanitizer, in builds that have it. Each CUDA thread is a
// separate fiber, and so is each agent that reads and writes on its behalf: its asynchronous
// copies, the TMA, the tensor cores. A barrier is a release and an acquire. Without ThreadSanitizer
// all of it is empty.
#pragma once

#include <cstddef>

#ifdef LONGSPAN_SIMULATED_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace longspan::simulated {

#ifdef LONGSPAN_SIMULATED_TSAN
inline constexpr bool kDetectsRaces = true;
#else
inline constexpr bool kDetectsRaces = false;
#endif

/// The events that happened before, as one agent knows them: one releases it, another acquires it.
class Order {
 public:
  void release() {
#ifdef LONGSPAN_SIMULATED_TSAN
    __tsan_release(this);
#endif
  }
  void acquire() {
#ifdef LONGSPAN_SIMULATED_TSAN
    __tsan_acquire(this);
#endif
  }

 private:
  char address_ = 0;
};

/// An agent whose accesses are ordered separately. Created when first used.
class Agent {
 public:
  Agent() = default;
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;
  ~Agent();

  /// Learns, once, what the running thread knows now.
  void begin();
  /// Calls work() as this agent.
  template <class Work>
  void act(const Work& work) {
#ifdef LONGSPAN_SIMULATED_TSAN
    if (context_ == nullptr) begin();
    void* const before = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(context_, 1);
    work();
    __tsan_switch_to_fiber(before, 1);
#else
    work();
#endif
  }
  void acquire(Order& order) {
    if constexpr (kDetectsRaces) act([&] { order.acquire(); });
  }
  void release(Order& order) {
    if constexpr (kDetectsRaces) act([&] { order.release(); });
  }

 private:
  [[maybe_unused]] void* context_ = nullptr;
};

inline void note_read([[maybe_unused]] const void* from, [[maybe_unused]] std::size_t bytes) {
#ifdef LONGSPAN_SIMULATED_TSAN
  if (bytes > 0) __tsan_read_range(const_cast<void*>(from), bytes);
#endif
}
inline void note_write([[maybe_unused]] void* to, [[maybe_unused]] std::size_t bytes) {
#ifdef LONGSPAN_SIMULATED_TSAN
  if (bytes > 0) __tsan_write_range(to, bytes);
#endif
}

/// Orders through a word of memory: an agent that acquires there knows what the agents that
/// released there knew.
inline void release_at([[maybe_unused]] void* address) {
#ifdef LONGSPAN_SIMULATED_TSAN
  __tsan_release(address);
#endif
}
inline void acquire_at([[maybe_unused]] const void* address) {
#ifdef LONGSPAN_SIMULATED_TSAN
  __tsan_acquire(const_cast<void*>(address));
#endif
}

/// Memory that is reused by another owner: its earlier accesses cannot race with the new owner's.
/// Whole pages; their contents are lost.
void forget_accesses(void* memory, std::size_t bytes);

/// During its lifetime accesses are the machine's own, and attributed to no agent.
class Quiet {
 public:
#ifdef LONGSPAN_SIMULATED_TSAN
  Quiet() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Quiet() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  Quiet() {}
  ~Quiet() {}
#endif
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;
};

}  // namespace longspan::simulated
