// Makes all NaN the same before bits are compared, where GPUs are simulated. A GPU's arithmetic has
// one NaN for every result. That of x86 passes on the sign and the payload of the operand that the
// compiler names first, so ranks that did the same would have other bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "longspan/types.hpp"

namespace longspan::launcher {

template <class Word>
void unite_nans(std::vector<std::byte>& elements, Word infinity) {
  const Word magnitude = static_cast<Word>(~Word{0}) >> 1;
  for (std::size_t at = 0; at + sizeof(Word) <= elements.size(); at += sizeof(Word)) {
    Word word;
    std::memcpy(&word, &elements[at], sizeof word);
    if ((word & magnitude) > infinity) std::memcpy(&elements[at], &magnitude, sizeof word);
  }
}

/// Makes all NaN the same. Does nothing in a build for real GPUs, where every bit is compared.
inline void unite_nans([[maybe_unused]] std::vector<std::byte>& elements,
                       [[maybe_unused]] DType dtype) {
#if defined(LONGSPAN_SIMULATED)
  switch (dtype) {
    case DType::fp64:
      return unite_nans<std::uint64_t>(elements, 0x7ff0000000000000);
    case DType::fp32:
      return unite_nans<std::uint32_t>(elements, 0x7f800000);
    case DType::bf16:
      return unite_nans<std::uint16_t>(elements, 0x7f80);
    case DType::fp16:
      return unite_nans<std::uint16_t>(elements, 0x7c00);
    case DType::e5m2:
      return unite_nans<std::uint8_t>(elements, 0x7c);
    case DType::e4m3:  // it has no infinity
      return unite_nans<std::uint8_t>(elements, 0x7e);
    case DType::int32:
    case DType::int64:
    case DType::uint8:
      return;
  }
#endif
}

}  // namespace longspan::launcher
