// The constants of a machine: a file returns what was written, and invalid values are refused with
// the file's name.
#include "longspan/machine.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <utility>

#include "longspan/error.hpp"

namespace longspan {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(Machine, ATextGivesBackItsConstants) {
  for (const Device device : {Device::host, Device::cuda}) {
    const Machine machine = built_in_machine(device);
    const Machine again = machine_from("# a remark\n\n" + to_text(machine), "there", device);
    EXPECT_EQ(to_text(again), to_text(machine));
    EXPECT_EQ(again.name, "there");
    EXPECT_EQ(again.device, device);
    EXPECT_EQ(again.link_bytes_per_s, machine.link_bytes_per_s);
    EXPECT_EQ(again.overlap, machine.overlap);
  }
}

TEST(Machine, ATextSaysWhenItWasMeasured) {
  Machine machine = built_in_machine(Device::host);
  EXPECT_EQ(origin_of(machine), "built in, of one core");
  machine.measured = "2026-11-28, spread 1.20";
  const Machine again =
      machine_from("# longspan calibrate\n" + to_text(machine), "there", Device::host);
  EXPECT_EQ(again.measured, machine.measured);
  EXPECT_EQ(to_text(again), to_text(machine));
  EXPECT_EQ(origin_of(again), "there, measured 2026-11-28, spread 1.20");
  // It is shown to people, and stays one line.
  machine.measured = "today\n\x1b[2J" + std::string(100, 'x');
  const std::string shown = machine_from(to_text(machine), "there", Device::host).measured;
  EXPECT_THAT(shown, AllOf(::testing::StartsWith("today??[2Jxxx"), ::testing::EndsWith("x...")));
}

/// A file that `longspan calibrate` wrote before it separated two latencies still works.
TEST(Machine, AnOlderTextHasOneLatency) {
  std::string text = to_text(built_in_machine(Device::cuda));
  const std::size_t line = text.find("peer_latency_s");
  text.erase(line, text.find('\n', line) + 1 - line);
  const Machine machine = machine_from(text, "there", Device::cuda);
  EXPECT_EQ(machine.peer_latency_s, machine.latency_s);
  EXPECT_EQ(machine.latency_s, built_in_machine(Device::cuda).latency_s);
}

TEST(Machine, ATextThatMakesNoSenseIsRefusedByName) {
  const std::string good = to_text(built_in_machine(Device::host));
  const auto refused = [](const std::string& text, const char* word) {
    EXPECT_THAT([&] { machine_from(text, "a.machine", Device::host); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("a.machine"), HasSubstr(word))));
  };
  refused(good + "speed 3\n", "'speed'");
  refused(good + "latency_s 0\n", "latency_s '0'");
  refused(good + "latency_s 1e308\n", "'1e308', which is not a number of seconds from 1e-15 to");
  refused(good + "call_s 1e-320\n", "'1e-320', which is not a number of seconds from 1e-15 to");
  refused(good + "flops_per_s 1e-320\n", "'1e-320', which is not a rate from 1 to 1e30");
  refused(good + "flops_per_s 1e400\n", "'1e400', which is not a rate from 1 to 1e30");
  refused(good + std::string(5000, 'x') + " 1\n", "xxx...', which is not a constant");
  refused(good + "\x80\xff 1\n", "?', which is not a constant");
  refused(good + "latency_s -1e-6\n", "latency_s");
  refused(good + "latency_s nan\n", "latency_s");
  refused(good + "latency_s 1e-6s\n", "latency_s");
  refused(good + "overlap 1.5\n", "overlap");
  refused(good + "latency_s\n", "not a name and a value");
  refused(good + "latency_s 1 2\n", "not a name and a value");
  refused(good.substr(good.find('\n') + 1), "no flops_per_s");
  refused("", "no flops_per_s");
}

/// Sets a variable for as long as it lives.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    ::setenv(name, value.c_str(), 1);
  }
  ~Variable() { old_.empty() ? ::unsetenv(name_) : ::setenv(name_, old_.c_str(), 1); }

 private:
  const char* name_;
  std::string old_;
};

TEST(Machine, HereIsTheFileThatIsNamedOrTheUsersOrBuiltIn) {
  const std::string folder = ::testing::TempDir() + "settings." + std::to_string(::getpid());
  const Variable settings("XDG_CONFIG_HOME", folder);
  EXPECT_EQ(machine_here(Device::host).name, built_in_machine(Device::host).name);
  EXPECT_EQ(machine_file(Device::host), folder + "/longspan/host.machine");

  const std::string file = folder + ".machine";
  const Variable named("LONGSPAN_MACHINE", file);
  EXPECT_EQ(machine_file(Device::cuda), file);
  EXPECT_THAT([] { machine_here(Device::host); }, ThrowsMessage<UsageError>(HasSubstr(file)));
  Machine machine = built_in_machine(Device::host);
  machine.call_s = 0.25;
  std::ofstream(file) << to_text(machine);
  EXPECT_EQ(machine_here(Device::host).call_s, 0.25);
  EXPECT_EQ(machine_here(Device::host).name, file);
  ::unlink(file.c_str());
}

/// None of them is waited for, and none is read without end.
TEST(Machine, WhatIsNoFileOfConstantsIsRefused) {
  const std::string folder = ::testing::TempDir() + "odd." + std::to_string(::getpid());
  std::filesystem::create_directory(folder);
  const std::string fifo = folder + "/fifo", large = folder + "/large";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  std::ofstream(large) << std::string(70 << 10, '#');
  for (const auto& [path, word] :
       {std::pair{folder, "is a folder"}, std::pair{fifo, "is no ordinary file"},
        std::pair{std::string("/dev/zero"), "is no ordinary file"},
        std::pair{large, "more than 65536 bytes"},
        std::pair{folder + "/none", "cannot be opened: No such file"}}) {
    EXPECT_THAT([&] { machine_in(path, Device::host); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr(path), HasSubstr(word))));
    const Variable named("LONGSPAN_MACHINE", path);
    EXPECT_THAT([] { machine_here(Device::host); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("LONGSPAN_MACHINE"), HasSubstr(word))));
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace longspan
