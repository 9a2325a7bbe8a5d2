#include "kernels/simulated/runtime/stream_memory.hpp"

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/simulated/race_detector.hpp"
#include "kernels/simulated/runtime/calls.hpp"
#include "kernels/simulated/runtime/memory.hpp"
#include "kernels/simulated/runtime/streams.hpp"

namespace longspan::simulated {
namespace {

struct Word {
  bool is_awaited;
  void* place;
  std::uint64_t value;
};

template <class T>
std::atomic_ref<T> at(void* place) {
  return std::atomic_ref(*static_cast<T*>(place));
}

bool is_good(const Word& word) {
  const std::size_t bytes = word.is_awaited ? 8 : 4;
  return reinterpret_cast<std::uintptr_t>(word.place) % bytes == 0 &&
         look_up(word.place, bytes).where == Where::inside;
}

/// False: the operation is not known here.
bool read(const CUstreamBatchMemOpParams& p, Word& word) {
  if (p.operation == CU_STREAM_MEM_OP_WAIT_VALUE_64 &&
      p.waitValue.flags == CU_STREAM_WAIT_VALUE_GEQ)
    word = {true, reinterpret_cast<void*>(p.waitValue.address), p.waitValue.value64};
  else if (p.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32 && p.writeValue.flags == 0)
    word = {false, reinterpret_cast<void*>(p.writeValue.address), p.writeValue.value};
  else
    return false;
  return is_good(word);
}

/// Processes the words, up to one that has not arrived yet.
Poll walk(const std::vector<Word>& words) {
  return [words, next = std::size_t{0}]() mutable {
    const std::size_t before = next;
    for (; next < words.size(); ++next) {
      const Word& word = words[next];
      if (!word.is_awaited) {
        release_at(word.place);
        at<std::uint32_t>(word.place).store(static_cast<std::uint32_t>(word.value));
        continue;
      }
      const std::uint64_t found = at<std::uint64_t>(word.place).load();
      if (static_cast<std::int64_t>(found - word.value) < 0)
        return next > before ? Progress::some : Progress::none;
    }
    return Progress::ended;
  };
}

}  // namespace

CUresult CUDAAPI simulated_stream_batch(CUstream handle, unsigned count,
                                        CUstreamBatchMemOpParams* operations, unsigned flags) {
  const cudaError_t result = call("cuStreamBatchMemOp", [&](Lock&) {
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (operations == nullptr || count == 0 || count > 256 || flags != 0)
      return cudaErrorInvalidValue;
    std::vector<Word> words(count);
    for (unsigned i = 0; i < count; ++i)
      if (!read(operations[i], words[i])) return cudaErrorInvalidValue;
    return submit(*stream, {.begin = [words = std::move(words)] { return walk(words); }});
  });
  return static_cast<CUresult>(result);  // both enums have the same numbers for these
}

}  // namespace longspan::simulated
