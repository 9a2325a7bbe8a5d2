// Loads and stores shared with other GPUs, and the clock that bounds the waits for them, in the
// simulator. Of 16 bytes each aligned eight move as a unit, of fewer each aligned four: the least
// that the kernels may rely on.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/simulated/thread.hpp"

namespace longspan::kernels::cuda::arch {
namespace peer {

inline void check(const void* address, std::uintptr_t bytes, const char* what,
                  simulated::Site site) {
  if (reinterpret_cast<std::uintptr_t>(address) % bytes != 0)
    simulated::fail(std::string(what) + ": the address is not a multiple of the access", site);
}

/// `kCount` words of Word, one after another; other threads may run, and words arrive, between
/// them.
template <class Word, int kCount>
void store(void* to, const Word (&words)[kCount], simulated::Site site) {
  check(to, sizeof(words), "st.volatile", site);
  for (int i = 0; i < kCount; ++i) {
    simulated::send_word(static_cast<Word*>(to) + i, words[i], sizeof(Word), site);
  }
}
template <class Word, int kCount>
void load(const void* from, Word (&words)[kCount], const char* what, simulated::Site site) {
  check(from, sizeof(words), what, site);
  for (int i = 0; i < kCount; ++i) {
    words[i] = static_cast<Word>(
        simulated::fetch_word(static_cast<const Word*>(from) + i, sizeof(Word), site));
  }
}

}  // namespace peer

inline void store_volatile(void* to, uint4 value,
                           simulated::Site site = simulated::Site::current()) {
  const std::uint64_t words[2] = {value.x | static_cast<std::uint64_t>(value.y) << 32,
                                  value.z | static_cast<std::uint64_t>(value.w) << 32};
  peer::store(to, words, site);
}
inline uint4 load_volatile(const void* from, simulated::Site site = simulated::Site::current()) {
  std::uint64_t words[2];
  peer::load(from, words, "ld.volatile", site);
  return std::bit_cast<uint4>(words);
}

inline uint2 load_volatile_two(const void* from,
                               simulated::Site site = simulated::Site::current()) {
  std::uint32_t words[2];
  peer::load(from, words, "ld.volatile", site);
  return {words[0], words[1]};
}

inline void store_volatile(void* to, uint2 value,
                           simulated::Site site = simulated::Site::current()) {
  const std::uint32_t words[2] = {value.x, value.y};
  peer::store(to, words, site);
}
inline void store_volatile(void* to, std::uint32_t value,
                           simulated::Site site = simulated::Site::current()) {
  const std::uint32_t words[1] = {value};
  peer::store(to, words, site);
}

inline void store_whole(std::uint64_t* to, std::uint64_t value,
                        simulated::Site site = simulated::Site::current()) {
  const std::uint64_t words[1] = {value};
  peer::store(to, words, site);
}
inline std::uint64_t load_whole(const std::uint64_t* from,
                                simulated::Site site = simulated::Site::current()) {
  std::uint64_t words[1];
  peer::load(from, words, "ld.volatile", site);
  return words[0];
}

inline std::uint64_t load_acquire(const std::uint64_t* from,
                                  simulated::Site site = simulated::Site::current()) {
  peer::check(from, sizeof *from, "ld.acquire", site);
  return simulated::acquire_word(from, sizeof *from, site);
}

inline void count_release(std::uint64_t* word, std::uint64_t more,
                          simulated::Site site = simulated::Site::current()) {
  peer::check(word, sizeof *word, "red.release", site);
  simulated::count_word(word, more, site);
}

/// Loads that leave `value` unchanged unless `wanted`.
inline void load_volatile_if(bool wanted, const void* from, uint4& value,
                             simulated::Site site = simulated::Site::current()) {
  if (wanted) value = load_volatile(from, site);
}
inline void load_volatile_if(bool wanted, const void* from, uint2& value,
                             simulated::Site site = simulated::Site::current()) {
  if (wanted) value = load_volatile_two(from, site);
}
inline void load_volatile_if(bool wanted, const void* from, std::uint32_t& value,
                             simulated::Site site = simulated::Site::current()) {
  if (!wanted) return;
  std::uint32_t words[1];
  peer::load(from, words, "ld.volatile", site);
  value = words[0];
}

inline void store_relaxed(std::uint32_t* word, std::uint32_t value,
                          simulated::Site site = simulated::Site::current()) {
  peer::check(word, 4, "st.relaxed", site);
  simulated::may_yield(site);
  simulated::store_quietly(word, &value, sizeof(value));
}
inline std::uint32_t load_relaxed(const std::uint32_t* word,
                                  simulated::Site site = simulated::Site::current()) {
  std::uint32_t words[1];
  peer::load(word, words, "ld.relaxed", site);
  return words[0];
}

inline void prefetch(const void*) {}

/// A thread that reads the clock usually waits for something.
inline std::uint64_t nanoseconds(simulated::Site site = simulated::Site::current()) {
  simulated::may_yield(site);
  return simulated::nanoseconds();
}

}  // namespace longspan::kernels::cuda::arch
