#include "launcher/io/npy.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>

#include "longspan/error.hpp"
#include "longspan/storage.hpp"

namespace longspan::launcher {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";

template <class... Args>
[[noreturn]] void refuse(const std::string& path, fmt::format_string<Args...> format,
                         Args&&... args) {
  throw InputError(fmt::format("{}: {}", path, fmt::format(format, std::forward<Args>(args)...)));
}

/// The text after `'key':` in a header such as {'descr': '<f4', 'fortran_order': False, ...}.
std::string_view value_of(std::string_view header, std::string_view key, const std::string& path) {
  const std::size_t at = header.find(fmt::format("'{}'", key));
  const std::size_t colon = at == header.npos ? at : header.find(':', at);
  if (colon == header.npos) refuse(path, "its .npy header has no '{}'", key);
  header.remove_prefix(colon + 1);
  header.remove_prefix(std::min(header.find_first_not_of(' '), header.size()));
  return header;
}

/// Reads the numbers of a tuple such as (40, 2, 16), (3,) or ().
std::vector<std::int64_t> read_shape(std::string_view text, const std::string& path) {
  std::vector<std::int64_t> shape;
  const auto skip = [&text](char wanted) {
    text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
    const bool there = text.starts_with(wanted);
    if (there) text.remove_prefix(1);
    return there;
  };
  bool readable = skip('(');
  for (bool comma = true; readable && !skip(')'); comma = skip(',')) {
    std::int64_t extent = -1;
    const auto [next, status] = std::from_chars(text.data(), text.data() + text.size(), extent);
    readable = comma && status == std::errc{} && extent >= 0;
    if (readable) text.remove_prefix(static_cast<std::size_t>(next - text.data()));
    shape.push_back(extent);
  }
  if (!readable) refuse(path, "its .npy header has no readable shape");
  return shape;
}

/// Accepts False in a header; refuses True, and anything else.
void refuse_fortran_order(std::string_view text, const std::string& path) {
  const std::string_view word = text.substr(0, text.find_first_of(" ,}\n"));
  if (word == "True") refuse(path, "is in Fortran order; save it with numpy.ascontiguousarray");
  if (word != "False")
    refuse(path, "its .npy header has no readable fortran_order: neither True nor False");
}

DType read_dtype(std::string_view text, const std::string& asked, const std::string& path) {
  if (text.substr(0, 1) != "'") refuse(path, "holds records, not one type of number");
  text.remove_prefix(1);
  const std::string_view code = text.substr(0, text.find('\''));
  DType found;
  if (code == "<f4") {
    found = DType::fp32;
  } else if (code == "<f2") {
    found = DType::fp16;
  } else if (code == "<V2" || code == "|V2") {
    if (asked.empty())
      refuse(path,
             "holds two-byte values of unknown meaning ('{}'); if they are bfloat16, add "
             "--dtype bf16",
             code);
    found = DType::bf16;
  } else {
    refuse(path,
           "holds '{}'; longspan reads '<f4' (fp32), '<f2' (fp16) and, with --dtype bf16, "
           "'<V2'",
           code);
  }
  if (!asked.empty() && asked != name(found))
    refuse(path, "holds {} ('{}'), but {} was asked for", name(found), code, asked);
  return found;
}

/// Opens a regular file for reading, and nothing else: a pipe would block, and cannot be read from
/// the middle.
int open_file(const std::string& path, std::size_t& bytes) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (descriptor < 0) refuse(path, "cannot be opened: {}", std::strerror(errno));
  struct stat status {};
  const bool regular = ::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
  bytes = regular ? static_cast<std::size_t>(status.st_size) : 0;
  if (regular && bytes > 0) return descriptor;
  ::close(descriptor);
  if (!regular) refuse(path, "is not a regular file");
  refuse(path, "is empty; a .npy file was expected");
}

}  // namespace

struct NpyFile::Descriptor {
  explicit Descriptor(int opened) : number(opened) {}
  ~Descriptor() { ::close(number); }
  Descriptor(const Descriptor&) = delete;
  int number;
};

NpyFile::NpyFile(const std::string& path, const std::string& dtype) : path_(path) {
  std::size_t bytes = 0;
  file_ = std::make_shared<const Descriptor>(open_file(path, bytes));
  const auto text = [&](std::size_t first, std::size_t count) {
    std::string part(count, '\0');
    read_bytes(first, count, part.data());
    return part;
  };
  const std::string preamble = text(0, std::min<std::size_t>(bytes, 12));
  if (!preamble.starts_with(kMagic)) refuse(path, "is not a .npy file");
  const int version = preamble.size() > 6 ? preamble[6] : 0;
  if (version < 1 || version > 3) refuse(path, "is .npy format {}; 1 to 3 are read", version);

  // The file begins with magic, two bytes of version, the header's length in 2 bytes (format 1) or
  // 4, and the header.
  const std::size_t start = version == 1 ? 10 : 12;
  if (bytes < start) refuse(path, "is truncated: it ends inside its header");
  std::size_t length = 0;
  for (std::size_t i = start; i-- > 8;)
    length = length << 8 | static_cast<unsigned char>(preamble[i]);
  if (bytes - start < length) refuse(path, "is truncated: it ends inside its header");
  constexpr std::size_t kMost = 1 << 20;  // NumPy writes some 100 bytes
  if (length > kMost)
    refuse(path, "its .npy header has {} bytes; at most {} are read", length, kMost);
  const std::string header = text(start, length);

  dtype_ = read_dtype(value_of(header, "descr", path), dtype, path);
  refuse_fortran_order(value_of(header, "fortran_order", path), path);
  shape_ = read_shape(value_of(header, "shape", path), path);

  std::int64_t promised = static_cast<std::int64_t>(size_of(dtype_));
  for (const std::int64_t extent : shape_)
    if (__builtin_mul_overflow(promised, extent, &promised))
      refuse(path, "has the impossible shape {}", shape_text());
  const std::size_t found = bytes - start - length;
  if (found < static_cast<std::size_t>(promised))
    refuse(path, "is truncated: {} of {} take {} bytes, the file holds {}", shape_text(),
           name(dtype_), promised, found);
  data_ = start + length;
}

void NpyFile::read_bytes(std::size_t first, std::size_t count, void* to) const {
  auto* at = static_cast<char*>(to);
  while (count > 0) {
    const ssize_t got = ::pread(file_->number, at, count, static_cast<off_t>(first));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(path_, "cannot be read: {}", std::strerror(errno));
    if (got == 0) refuse(path_, "was truncated while it was read");
    at += got;
    first += static_cast<std::size_t>(got);
    count -= static_cast<std::size_t>(got);
  }
}

std::string NpyFile::shape_text() const { return fmt::format("[{}]", fmt::join(shape_, ", ")); }

std::string npy_header(DType dtype, std::span<const std::int64_t> shape) {
  const char* code = dtype == DType::fp32 ? "<f4" : dtype == DType::fp16 ? "<f2" : "<V2";
  std::string text = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}",
                                 code, fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
  const std::size_t preamble = kMagic.size() + 4;
  const std::size_t total = (preamble + text.size() + 1 + 63) / 64 * 64;
  text.resize(total - preamble - 1, ' ');
  text += '\n';
  std::string header(kMagic);
  header += {'\1', '\0', static_cast<char>(text.size() & 255), static_cast<char>(text.size() >> 8)};
  return header + text;
}

}  // namespace longspan::launcher
