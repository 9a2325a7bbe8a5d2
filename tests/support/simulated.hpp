// Whether the GPUs of this build are simulated (docs/contributing/testing.md). They compute a
// million times slower than real ones: tests do less there, and ignore times.
#pragma once

namespace longspan::tests {

#if defined(LONGSPAN_SIMULATED)
inline constexpr bool kSimulated = true;
#else
inline constexpr bool kSimulated = false;
#endif

}  // namespace longspan::tests
