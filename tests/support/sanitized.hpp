// Under a sanitizer a test takes ten times as long and more, and fewer random cases are enough for
// what it looks for.
#pragma once

namespace longspan::tests {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// How many of `usual` random cases to try.
constexpr int trials(int usual) { return kSanitized ? (usual + 5) / 6 : usual; }

}  // namespace longspan::tests
