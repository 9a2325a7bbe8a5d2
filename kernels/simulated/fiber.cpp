#include "kernels/simulated/fiber.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <deque>
#include <new>
#include <vector>

#include "kernels/simulated/race_detector.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define LONGSPAN_ASAN(x) x
#else
#define LONGSPAN_ASAN(x)
#endif

#if !defined(__x86_64__)
#error "the simulator switches stacks with instructions of x86-64: add this CPU's in fiber.cpp"
#endif

// Saves the registers that a call preserves on the old stack, and restores them from the new one.
extern "C" void longspan_switch_stack(void** from, void* to);
asm(R"(
.text
.globl longspan_switch_stack
.hidden longspan_switch_stack
.type longspan_switch_stack,@function
longspan_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size longspan_switch_stack,.-longspan_switch_stack
)");

namespace longspan::simulated {
namespace {

// Room for the largest frames of kernels, several times over: unused pages cost nothing.
constexpr std::size_t kStackBytes = std::size_t{256} << 10;
constexpr std::size_t kLine = 64, kLinesOfPage = 64;  // of a cache

std::size_t page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

/// Under ThreadSanitizer a stack stays with the context that has written to it, so it never becomes
/// another's. The cost of a barrier grows with the number of contexts, so they are reused: the one
/// that has been free longest, since accesses of one context are never found to race.
struct Stack {
  char* memory = nullptr;
  void* context = nullptr;
};
[[maybe_unused]] constexpr std::size_t kMostContexts = 1500;
[[maybe_unused]] std::size_t contexts_made = 0;
std::deque<Stack>& free_stacks() {
  static std::deque<Stack> stacks;
  return stacks;
}
[[maybe_unused]] std::deque<void*>& free_contexts() {
  static std::deque<void*> contexts;
  return contexts;
}

char* make_stack() {
  void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, page_bytes(), PROT_NONE);
  return static_cast<char*>(memory);
}

#ifdef LONGSPAN_SIMULATED_TSAN
void* make_context() {
  ++contexts_made;
  return __tsan_create_fiber(0);
}
/// Its knowledge from earlier use does not matter: that use ended before this one begins.
void begin_anew(void* context) {
  void* const before = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(context, 0);
  __tsan_switch_to_fiber(before, 1);
}
void* take_context() {
  if (free_contexts().empty() || contexts_made < kMostContexts) return make_context();
  void* const context = free_contexts().front();
  free_contexts().pop_front();
  begin_anew(context);
  return context;
}
#endif

Stack take_stack() {
#ifdef LONGSPAN_SIMULATED_TSAN
  if (free_stacks().empty() || contexts_made < kMostContexts) return {make_stack(), make_context()};
  const Stack stack = free_stacks().front();
  free_stacks().pop_front();
  begin_anew(stack.context);
  return stack;
#else
  if (free_stacks().empty()) return {make_stack(), nullptr};
  const Stack stack = free_stacks().back();  // the last one used is in the caches
  free_stacks().pop_back();
  return stack;
#endif
}

/// Stacks are alike, so their frames would fall into the same sets of the caches and evict each
/// other with each lane of a warp. This many bytes of a page stay free at the top of the next.
std::size_t next_offset() {
  constexpr std::size_t kStep = 21;  // lines; coprime to those of a page
  static std::size_t count = 0;
  return ++count * kStep % kLinesOfPage * kLine;
}

void* scheduler_pointer = nullptr;
[[maybe_unused]] void* scheduler_context = nullptr;
[[maybe_unused]] void* scheduler_fake_stack = nullptr;
[[maybe_unused]] const void* scheduler_bottom = nullptr;
[[maybe_unused]] std::size_t scheduler_size = 0;
[[maybe_unused]] bool from_scheduler = false;  // whether the running fiber was entered, not handed
                                               // over to

#if defined(__SANITIZE_ADDRESS__)
/// Runs on the new stack. The scheduler's stack is only known when it is left.
void finish_switch(void* fake_stack) {
  __sanitizer_finish_switch_fiber(fake_stack, from_scheduler ? &scheduler_bottom : nullptr,
                                  from_scheduler ? &scheduler_size : nullptr);
  from_scheduler = false;
}
#endif

}  // namespace

void forget_accesses([[maybe_unused]] void* memory, [[maybe_unused]] std::size_t bytes) {
#ifdef LONGSPAN_SIMULATED_TSAN
  mmap(memory, bytes, PROT_READ | PROT_WRITE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
#endif
}

Fiber::~Fiber() { end(); }

void Fiber::begin(Entry entry) {
  const Stack stack = take_stack();
  stack_ = stack.memory;
  context_ = stack.context;
  void** top = reinterpret_cast<void**>(stack_ + kStackBytes - next_offset());
  *--top = nullptr;  // where entry would return to
  *--top = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  stack_pointer_ = top;
}

void Fiber::end() {
  if (stack_ == nullptr) return;
  LONGSPAN_ASAN(ASAN_UNPOISON_MEMORY_REGION(stack_, kStackBytes));
  free_stacks().push_back({stack_, context_});
  stack_ = nullptr;
  context_ = nullptr;
}

void Fiber::enter() {
#ifdef LONGSPAN_SIMULATED_TSAN
  scheduler_context = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(context_, 1);
#endif
  LONGSPAN_ASAN(from_scheduler = true);
  LONGSPAN_ASAN(__sanitizer_start_switch_fiber(&scheduler_fake_stack, stack_, kStackBytes));
  longspan_switch_stack(&scheduler_pointer, stack_pointer_);
  LONGSPAN_ASAN(__sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr));
}

void Fiber::leave([[maybe_unused]] bool for_good) {
#ifdef LONGSPAN_SIMULATED_TSAN
  __tsan_switch_to_fiber(scheduler_context, 1);
#endif
  LONGSPAN_ASAN(__sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack_, scheduler_bottom,
                                               scheduler_size));
  longspan_switch_stack(&stack_pointer_, scheduler_pointer);
  LONGSPAN_ASAN(finish_switch(fake_stack_));
}

void Fiber::hand_over(Fiber& next, [[maybe_unused]] bool for_good) {
#ifdef LONGSPAN_SIMULATED_TSAN
  __tsan_switch_to_fiber(next.context_, 1);
#endif
  LONGSPAN_ASAN(
      __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack_, next.stack_, kStackBytes));
  longspan_switch_stack(&stack_pointer_, next.stack_pointer_);
  LONGSPAN_ASAN(finish_switch(fake_stack_));
}

void Fiber::arrive() { LONGSPAN_ASAN(finish_switch(nullptr)); }

void Agent::begin() {
#ifdef LONGSPAN_SIMULATED_TSAN
  if (context_ == nullptr) context_ = take_context();
#endif
}
Agent::~Agent() {
#ifdef LONGSPAN_SIMULATED_TSAN
  if (context_ != nullptr) free_contexts().push_back(context_);
#endif
}

}  // namespace longspan::simulated
