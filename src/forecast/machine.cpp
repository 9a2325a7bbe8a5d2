// The constants of a machine: the built-in ones, and those of a file.
#include "longspan/machine.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <sstream>
#include <string_view>

#include "longspan/error.hpp"
#include "src/arguments/validate.hpp"
#include "src/base/env.hpp"

namespace longspan {
namespace {

enum class Quantity { rate, time, part };

struct Constant {
  const char* name;
  double Machine::*value;
  Quantity quantity;
  double Machine::*otherwise =
      nullptr;  // what it is in a file from before there was such a constant
};

constexpr std::array kConstants{
    Constant{"flops_per_s", &Machine::flops_per_s, Quantity::rate},
    Constant{"key_bytes_per_s", &Machine::key_bytes_per_s, Quantity::rate},
    Constant{"merge_bytes_per_s", &Machine::merge_bytes_per_s, Quantity::rate},
    Constant{"copy_bytes_per_s", &Machine::copy_bytes_per_s, Quantity::rate},
    Constant{"call_s", &Machine::call_s, Quantity::time},
    Constant{"latency_s", &Machine::latency_s, Quantity::time},
    Constant{.name = "peer_latency_s",
             .value = &Machine::peer_latency_s,
             .quantity = Quantity::time,
             .otherwise = &Machine::latency_s},
    Constant{"link_bytes_per_s", &Machine::link_bytes_per_s, Quantity::rate},
    Constant{"node_latency_s", &Machine::node_latency_s, Quantity::time},
    Constant{"node_link_bytes_per_s", &Machine::node_link_bytes_per_s, Quantity::rate},
    Constant{"overlap", &Machine::overlap, Quantity::part},
};

/// Bounds of a measured value. Within them every forecast is a number.
struct Range {
  double least, most;
  const char* text;

  bool holds(double value) const { return value >= least && value <= most; }
};
const Range& range_of(Quantity quantity) {
  static constexpr Range kRate{1, 1e30, "a rate from 1 to 1e30 in a second"};
  static constexpr Range kTime{1e-15, 1e6, "a number of seconds from 1e-15 to 1e6"};
  static constexpr Range kPart{0, 1, "a number from 0 to 1"};
  return quantity == Quantity::rate ? kRate : quantity == Quantity::time ? kTime : kPart;
}

/// The comment of a file with the date of its measurement.
constexpr std::string_view kMeasured = "# measured ";

/// A short part of a file's text, for messages: a file of another kind may hold anything.
std::string shown(const std::string& text) {
  constexpr std::size_t kMost = 60;
  std::string some = text.substr(0, kMost);
  for (char& c : some)
    if (std::isprint(static_cast<unsigned char>(c)) == 0) c = '?';
  return text.size() > kMost ? some + "..." : some;
}

[[noreturn]] void refuse(const std::string& origin, const std::string& what) {
  throw UsageError(
      fmt::format("{} holds {}; `longspan calibrate` writes a file anew", origin, what));
}

double value_of(const Constant& constant, const std::string& text, const std::string& origin) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  const Range& range = range_of(constant.quantity);
  if (error != std::errc() || stop != end || !range.holds(value))
    refuse(origin, fmt::format("{} '{}', which is not {}", constant.name, shown(text), range.text));
  return value;
}

/// A descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

/// The text of a file; nothing if it cannot be opened, with errno. It does not block, as opening a
/// FIFO would, and reads no more than the size limit.
std::optional<std::string> text_of_file(const std::string& path) {
  constexpr std::size_t kMost = 64 << 10;
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
  if (file.number() < 0) return std::nullopt;
  struct stat about {};
  if (::fstat(file.number(), &about) != 0 || !S_ISREG(about.st_mode))
    throw UsageError(fmt::format(
        "{} is {}; constants of a machine are read from an ordinary file, as `longspan calibrate` "
        "writes it",
        path, S_ISDIR(about.st_mode) ? "a folder" : "no ordinary file"));
  std::string text(kMost + 1, '\0');
  std::size_t found = 0;
  while (found < text.size()) {
    const ssize_t n = ::read(file.number(), text.data() + found, text.size() - found);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw UsageError(fmt::format("{} cannot be read: {}", path, std::strerror(errno)));
    if (n == 0) break;
    found += static_cast<std::size_t>(n);
  }
  if (found > kMost)
    refuse(path, fmt::format("more than {} bytes, which no file of constants does", kMost));
  text.resize(found);
  return text;
}

}  // namespace

Machine built_in_machine(Device device) {
  if (device == Device::cuda)
    return {.device = device,
            .name = "built in, of an H200",
            .flops_per_s = 5.5e14,
            .key_bytes_per_s = 4.1e12,
            .merge_bytes_per_s = 2.5e12,
            .copy_bytes_per_s = 2.0e12,
            .call_s = 4e-6,
            .latency_s = 1.2e-5,
            .peer_latency_s = 8e-6,
            .link_bytes_per_s = 3.2e11,
            .node_latency_s = 2.5e-5,
            .node_link_bytes_per_s = 4.5e10,
            .overlap = 0.9};
  return {.device = device,
          .name = "built in, of one core",
          .flops_per_s = 4e10,
          .key_bytes_per_s = 8e9,
          .merge_bytes_per_s = 4e9,
          .copy_bytes_per_s = 4e9,
          .call_s = 1e-5,
          .latency_s = 1e-5,
          .peer_latency_s = 1e-5,
          .link_bytes_per_s = 2e9,
          .node_latency_s = 5e-5,
          .node_link_bytes_per_s = 1e9,
          .overlap = 0.0};
}

std::string origin_of(const Machine& machine) {
  return machine.name + (machine.measured.empty() ? "" : ", measured " + machine.measured);
}

std::string to_text(const Machine& machine) {
  std::string text;
  if (!machine.measured.empty()) text = fmt::format("{}{}\n", kMeasured, shown(machine.measured));
  for (const Constant& c : kConstants) text += fmt::format("{} {:.4g}\n", c.name, machine.*c.value);
  return text;
}

Machine machine_from(const std::string& text, const std::string& origin, Device device) {
  Machine machine{.device = device, .name = origin};
  std::array<bool, kConstants.size()> found{};
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name, value, more;
    if (line.starts_with(kMeasured)) machine.measured = shown(line.substr(kMeasured.size()));
    if (!(words >> name) || name.front() == '#') continue;
    std::size_t i = 0;
    while (i < kConstants.size() && name != kConstants[i].name) ++i;
    if (i == kConstants.size())
      refuse(origin, fmt::format("'{}', which is not a constant", shown(name)));
    if (!(words >> value) || words >> more)
      refuse(origin, fmt::format("the line '{}', which is not a name and a value", shown(line)));
    machine.*kConstants[i].value = value_of(kConstants[i], value, origin);
    found[i] = true;
  }
  for (std::size_t i = 0; i < kConstants.size(); ++i) {
    const Constant& missing = kConstants[i];
    if (found[i]) continue;
    if (missing.otherwise == nullptr) refuse(origin, fmt::format("no {}", missing.name));
    machine.*missing.value = machine.*missing.otherwise;
  }
  return machine;
}

void check_machine(const Machine& machine) {
  for (const Constant& c : kConstants) {
    const double value = machine.*c.value;
    const bool is_free = c.quantity == Quantity::time && value == 0;  // nothing that was measured
                                                                      // is free
    const Range& range = range_of(c.quantity);
    if (!is_free && !range.holds(value))
      throw UsageError(fmt::format("the machine '{}' has {} {}, which is not {}{}", machine.name,
                                   c.name, value, range.text,
                                   c.quantity == Quantity::time ? ", or 0" : ""));
  }
}

std::string machine_file(Device device) {
  if (const auto named = env_text("LONGSPAN_MACHINE")) return *named;
  const std::string file = fmt::format("/longspan/{}.machine", name(device));
  if (const auto settings = env_text("XDG_CONFIG_HOME")) return *settings + file;
  if (const auto home = env_text("HOME")) return *home + "/.config" + file;
  return {};
}

Machine machine_in(const std::string& path, Device device) {
  const std::optional<std::string> text = text_of_file(path);
  if (!text)
    throw UsageError(fmt::format("{} cannot be opened: {}; `longspan calibrate` writes such a file",
                                 path, std::strerror(errno)));
  return machine_from(*text, path, device);
}

Machine machine_here(Device device) {
  const std::string path = machine_file(device);
  if (env_text("LONGSPAN_MACHINE")) {
    try {
      return machine_in(path, device);
    } catch (const UsageError& error) {
      throw UsageError(fmt::format("LONGSPAN_MACHINE='{}' was set: {}", path, error.what()));
    }
  }
  if (path.empty()) return built_in_machine(device);
  const std::optional<std::string> text = text_of_file(path);
  return text ? machine_from(*text, path, device) : built_in_machine(device);
}

}  // namespace longspan
