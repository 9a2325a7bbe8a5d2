// The constants of a machine: the built-in ones, and those of a file.
#include "longspan/machine.hpp"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <fstream>
#include <iterator>
#include <sstream>

#include "longspan/error.hpp"
#include "src/env.hpp"
#include "src/validate.hpp"

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

/// Whether a measurement gives such a number.
bool can_be(Quantity quantity, double value) {
  return quantity == Quantity::part ? value >= 0 && value <= 1 : value > 0 && value <= 1e30;
}
const char* wanted(Quantity quantity) {
  return quantity == Quantity::part ? "a number from 0 to 1" : "a number above 0";
}

[[noreturn]] void refuse(const std::string& origin, const std::string& what) {
  throw UsageError(
      fmt::format("{} holds {}; `longspan calibrate` writes a file anew", origin, what));
}

double value_of(const Constant& constant, const std::string& text, const std::string& origin) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || !can_be(constant.quantity, value))
    refuse(origin,
           fmt::format("{} '{}', which is not {}", constant.name, text, wanted(constant.quantity)));
  return value;
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

std::string to_text(const Machine& machine) {
  std::string text;
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
    if (!(words >> name) || name.front() == '#') continue;
    std::size_t i = 0;
    while (i < kConstants.size() && name != kConstants[i].name) ++i;
    if (i == kConstants.size()) refuse(origin, fmt::format("'{}', which is no constant", name));
    if (!(words >> value) || words >> more)
      refuse(origin, fmt::format("the line '{}', which is no name and value", line));
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
    const bool is_free = c.quantity == Quantity::time && value == 0;  // as nothing measured is
    if (!is_free && !can_be(c.quantity, value))
      throw UsageError(fmt::format("the machine '{}' has {} {}, which is not {}{}", machine.name,
                                   c.name, value, wanted(c.quantity),
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

Machine machine_here(Device device) {
  const std::string path = machine_file(device);
  std::ifstream file(path);
  if (path.empty() || !file) {
    if (env_text("LONGSPAN_MACHINE"))
      throw UsageError(fmt::format(
          "LONGSPAN_MACHINE='{}' was set, and that file cannot be opened; `longspan calibrate` "
          "writes one",
          path));
    return built_in_machine(device);
  }
  return machine_from({std::istreambuf_iterator<char>(file), {}}, path, device);
}

}  // namespace longspan
