// The environment: what is read, what is refused, and that the printed table is that of the
// variables read.
#include "src/base/env.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <map>
#include <optional>

#include "comm/control/environment.hpp"
#include "longspan/error.hpp"
#include "longspan/info.hpp"

namespace longspan {
namespace {

using comm::Launch;
using comm::Launcher;
using ::testing::HasSubstr;

using Set = std::map<std::string, std::string>;

/// Clears every variable that longspan reads, sets some, and restores all at the end.
class Variables {
 public:
  explicit Variables(const Set& set) {
    for (const auto& variable : environment()) {
      before_[variable.name] = env_text(variable.name.c_str());
      unsetenv(variable.name.c_str());
    }
    for (const auto& [name, value] : set) setenv(name.c_str(), value.c_str(), 1);
  }
  ~Variables() {
    for (const auto& [name, value] : before_) {
      if (value)
        setenv(name.c_str(), value->c_str(), 1);
      else
        unsetenv(name.c_str());
    }
  }

 private:
  std::map<std::string, std::optional<std::string>> before_;
};

TEST(Env, StandardValues) {
  const Variables none(Set{});
  const Env env = Env::read();
  EXPECT_EQ(env.deadline, std::chrono::seconds(60));
  EXPECT_EQ(env.threads, 0);
  EXPECT_EQ(env.port, 0);
}

TEST(Env, ReadsWhatIsSet) {
  const Variables set(
      {{"LONGSPAN_DEADLINE_S", "2.5"}, {"LONGSPAN_THREADS", "3"}, {"LONGSPAN_PORT", "4711"}});
  const Env env = Env::read();
  EXPECT_EQ(env.deadline, std::chrono::milliseconds(2500));
  EXPECT_EQ(env.threads, 3);
  EXPECT_EQ(env.port, 4711);
}

TEST(Env, EmptyIsNotSet) {
  const Variables set(Set{{"LONGSPAN_THREADS", ""}});
  EXPECT_EQ(Env::read().threads, 0);
  EXPECT_FALSE(env_text("LONGSPAN_THREADS").has_value());
}

TEST(Env, RefusesWhatDoesNotParseAndSaysWhy) {
  const std::pair<const char*, const char*> wrong[] = {
      {"LONGSPAN_DEADLINE_S", "soon"}, {"LONGSPAN_DEADLINE_S", "0"},
      {"LONGSPAN_DEADLINE_S", "-1"},   {"LONGSPAN_DEADLINE_S", "nan"},
      {"LONGSPAN_DEADLINE_S", "inf"},  {"LONGSPAN_DEADLINE_S", "5s"},
      {"LONGSPAN_THREADS", "-1"},      {"LONGSPAN_THREADS", "2.5"},
      {"LONGSPAN_THREADS", " 2"},      {"LONGSPAN_PORT", "65536"},
  };
  for (const auto& [name, value] : wrong) {
    const Variables set(Set{{name, value}});
    try {
      Env::read();
      ADD_FAILURE() << name << "=" << value << " was taken";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr(name));
      EXPECT_THAT(error.what(), HasSubstr(value));
    }
  }
}

TEST(Env, TheTableShowsWhatIsSet) {
  const Variables set(Set{{"LONGSPAN_THREADS", "5"}});
  bool found = false;
  for (const auto& variable : environment()) {
    EXPECT_FALSE(variable.meaning.empty()) << variable.name;
    if (variable.name != "LONGSPAN_THREADS") continue;
    found = true;
    EXPECT_EQ(variable.value, "5");
  }
  EXPECT_TRUE(found);
}

TEST(Env, ASecretIsReadAndNeverShown) {
  for (const char* secret : {"", "open sesame"}) {
    const Variables set(Set{{"LONGSPAN_SECRET", secret}});
    EXPECT_EQ(Env::read().secret, secret);
    bool found = false;
    for (const auto& variable : environment()) {
      if (variable.name != "LONGSPAN_SECRET") continue;
      found = true;
      EXPECT_EQ(variable.value, *secret ? "set" : "not set");
    }
    EXPECT_TRUE(found);
  }
  const std::string long_one(2000, 'x');
  const Variables set(Set{{"LONGSPAN_SECRET", long_one}});
  try {
    Env::read();
    ADD_FAILURE() << "was taken";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("2000 bytes"));
    EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("xx")));
  }
}

TEST(Env, DefaultsDoNotOverrule) {
  const Variables set(Set{{"NCCL_NVLS_ENABLE", "1"}});
  env_default("NCCL_NVLS_ENABLE", "0");
  EXPECT_EQ(env_text("NCCL_NVLS_ENABLE"), "1");
  unsetenv("NCCL_NVLS_ENABLE");
  env_default("NCCL_NVLS_ENABLE", "0");
  EXPECT_EQ(env_text("NCCL_NVLS_ENABLE"), "0");
}

Launch launch_of(const Set& set) {
  const Variables variables(set);
  return comm::find_launch();
}

TEST(Launch, NothingSetIsOneProcess) {
  EXPECT_EQ(launch_of({}).by, Launcher::none);
  // Nor do variables that imply no other ranks.
  EXPECT_EQ(launch_of({{"MASTER_ADDR", "head"}, {"MASTER_PORT", "29500"}}).by, Launcher::none);
  EXPECT_EQ(launch_of({{"WORLD_SIZE", "1"}}).by, Launcher::none);
  EXPECT_EQ(launch_of({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).size, 1);
  EXPECT_EQ(launch_of({{"SLURM_PROCID", "0"}}).by, Launcher::none);  // the batch script itself
}

/// A process that would compute alone while the others of its job wait for it.
TEST(Launch, HalfOfALaunchersVariablesAreRefused) {
  struct Case {
    Set set;
    std::vector<const char*> says;
  };
  const Case cases[] = {
      {{{"WORLD_SIZE", "2"}}, {"WORLD_SIZE=2 is set", "RANK and MASTER_ADDR are not"}},
      {{{"RANK", "1"}}, {"RANK=1 is set", "WORLD_SIZE and MASTER_ADDR are not"}},
      {{{"RANK", "0"}}, {"RANK=0 is set", "WORLD_SIZE"}},
      {{{"RANK", "1"}, {"WORLD_SIZE", "2"}},
       {"RANK=1 and WORLD_SIZE=2 are set", "MASTER_ADDR is not"}},
      {{{"WORLD_SIZE", "2"}, {"MASTER_ADDR", "head"}},
       {"WORLD_SIZE=2 and MASTER_ADDR=head are set", "RANK is not"}},
      {{{"RANK", "1"}, {"MASTER_ADDR", "head"}, {"TORCHELASTIC_RUN_ID", "none"}},
       {"RANK=1", "WORLD_SIZE is not"}},
      // mpirun started torchrun, the inner one counts, and half of its variables are set.
      {{{"RANK", "1"},
        {"TORCHELASTIC_RUN_ID", "none"},
        {"OMPI_COMM_WORLD_RANK", "0"},
        {"OMPI_COMM_WORLD_SIZE", "2"}},
       {"RANK=1", "WORLD_SIZE and MASTER_ADDR are not"}},
      {{{"SLURM_STEP_NUM_TASKS", "2"}}, {"SLURM_STEP_NUM_TASKS=2 is set", "SLURM_PROCID is not"}},
      {{{"SLURM_PROCID", "3"}}, {"SLURM_PROCID=3 is set", "SLURM_STEP_NUM_TASKS is not"}},
      {{{"OMPI_COMM_WORLD_RANK", "0"}},
       {"OMPI_COMM_WORLD_RANK=0 is set", "OMPI_COMM_WORLD_SIZE is not"}},
      {{{"OMPI_COMM_WORLD_SIZE", "2"}}, {"OMPI_COMM_WORLD_RANK is not"}},
      {{{"PMI_RANK", "0"}}, {"PMI_RANK=0 is set", "PMI_SIZE is not"}},
      {{{"PMI_SIZE", "2"}}, {"PMI_SIZE=2 is set", "PMI_RANK is not"}},
  };
  for (const auto& [set, says] : cases) {
    std::string shown;
    for (const auto& [name, value] : set) shown += name + "=" + value + " ";
    SCOPED_TRACE(shown);
    try {
      launch_of(set);
      ADD_FAILURE() << "was taken";
    } catch (const UsageError& error) {
      for (const char* words : says) EXPECT_THAT(error.what(), HasSubstr(words));
      EXPECT_THAT(error.what(), HasSubstr("every rank"));
    }
  }
}

/// Another launcher's complete variables identify this process.
TEST(Launch, HalfOfOnesVariablesBesideAllOfAnothers) {
  Set set = {{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_NODELIST", "n"}};
  set["WORLD_SIZE"] = "2";  // a batch script that exports it for programs that need it
  EXPECT_EQ(launch_of(set).by, Launcher::srun);
  set = {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"RANK", "1"}};
  EXPECT_EQ(launch_of(set).by, Launcher::mpirun);
  set = {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"PMI_RANK", "0"}};
  EXPECT_EQ(launch_of(set).by, Launcher::torchrun);
}

TEST(Launch, Mpirun) {
  const Launch open_mpi = launch_of({{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_RANK", "2"}});
  EXPECT_EQ(open_mpi.by, Launcher::mpirun);
  EXPECT_EQ(open_mpi.size, 4);
  EXPECT_EQ(open_mpi.rank, 2);
  EXPECT_EQ(launch_of({{"PMI_SIZE", "3"}, {"PMI_RANK", "0"}}).size, 3);
  EXPECT_EQ(launch_of({{"PMIX_RANK", "1"}, {"SLURM_STEP_NUM_TASKS", "8"}}).size, 8);
}

TEST(Launch, Torchrun) {
  Set set = {{"RANK", "2"},
             {"WORLD_SIZE", "4"},
             {"MASTER_ADDR", "head"},
             {"MASTER_PORT", "29500"},
             {"TORCHELASTIC_RUN_ID", "none"}};
  Launch launch = launch_of(set);
  EXPECT_EQ(launch.by, Launcher::torchrun);
  EXPECT_EQ(launch.rank, 2);
  EXPECT_EQ(launch.size, 4);
  EXPECT_EQ(launch.address, "head");
  EXPECT_EQ(launch.port, 29501);
  set["LONGSPAN_PORT"] = "7000";
  EXPECT_EQ(launch_of(set).port, 7000);

  set["OMPI_COMM_WORLD_SIZE"] = "2";  // mpirun started torchrun: the inner one counts
  set["OMPI_COMM_WORLD_RANK"] = "0";
  EXPECT_EQ(launch_of(set).by, Launcher::torchrun);
  set.erase("TORCHELASTIC_RUN_ID");  // a script under mpirun that set RANK for another program
  EXPECT_EQ(launch_of(set).by, Launcher::mpirun);
}

TEST(Launch, Srun) {
  Set set = {{"SLURM_PROCID", "3"},
             {"SLURM_STEP_NUM_TASKS", "8"},
             {"SLURM_STEP_NODELIST", "gpu[07-08,11]"},
             {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"},
             {"SLURM_JOB_ID", "123"},
             {"SLURM_STEP_ID", "0"}};
  const Launch launch = launch_of(set);
  EXPECT_EQ(launch.by, Launcher::srun);
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(launch.size, 8);
  EXPECT_EQ(launch.address, "gpu07");
  EXPECT_GE(launch.port, 20000);
  set["SLURM_PROCID"] = "5";
  EXPECT_EQ(launch_of(set).port, launch.port);
  set["SLURM_STEP_ID"] = "1";
  EXPECT_NE(launch_of(set).port, launch.port);

  for (const auto& [list, first] :
       Set{{"node1,node2", "node1"}, {"node1", "node1"}, {"n[3,5-9]x", "n3"}}) {
    set["SLURM_STEP_NODELIST"] = list;
    EXPECT_EQ(launch_of(set).address, first);
  }
  set.erase("SLURM_STEP_NODELIST");
  EXPECT_EQ(launch_of(set).address, "10.0.0.1");
  set["MASTER_ADDR"] = "head";
  EXPECT_EQ(launch_of(set).address, "head");
  set["SLURM_PROCID"] = "0";
  set.erase("SLURM_STEP_NUM_TASKS");  // the batch script itself
  EXPECT_EQ(launch_of(set).by, Launcher::none);
}

TEST(Launch, JobIdsOfAnySizeChooseAPort) {
  Set set = {{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_NODELIST", "n"}};
  std::map<int, int> ports;
  for (const char* job : {"69273666", "69273667", "70000000", "2147483647", "2147483648",
                          "4294967295", "18446744073709551615"}) {
    set["SLURM_JOB_ID"] = job;
    for (const char* step : {"0", "1", "4294967290"}) {
      set["SLURM_STEP_ID"] = step;
      const int port = launch_of(set).port;
      EXPECT_GE(port, 20000) << job << "." << step;
      EXPECT_LT(port, 40000) << job << "." << step;
      EXPECT_EQ(launch_of(set).port, port);
      ++ports[port];
    }
  }
  EXPECT_GT(ports.size(), 15u);      // some may coincide
  set["SLURM_JOB_ID"] = "69273667";  // times 31 it overflows an int
  set["SLURM_STEP_ID"] = "2";
  EXPECT_EQ(launch_of(set).port, 20000 + (69273667LL * 31 + 2) % 20000);
}

TEST(Launch, RefusesPortsThatCannotBe) {
  Set set = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}};
  for (const char* port : {"0", "65536", "99999999999", "-1", "http"}) {
    set["MASTER_PORT"] = port;
    try {
      launch_of(set);
      ADD_FAILURE() << port << " was taken";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("MASTER_PORT"));
      EXPECT_THAT(error.what(), HasSubstr(port));
    }
  }
  set["MASTER_PORT"] = "65535";
  EXPECT_EQ(launch_of(set).port, 65534);
}

TEST(Launch, RefusesDeadlinesThatOverflow) {
  using std::chrono::milliseconds;
  const Variables none(Set{});
  const auto deadline_of = [](milliseconds asked) {
    return comm::deadline_of({.deadline = asked});
  };
  EXPECT_EQ(deadline_of(milliseconds(0)), std::chrono::seconds(60));
  EXPECT_EQ(deadline_of(milliseconds(7)), milliseconds(7));
  EXPECT_EQ(deadline_of(milliseconds(1'000'000'000)), milliseconds(1'000'000'000));
  for (const milliseconds asked :
       {milliseconds(-1), milliseconds(1'000'000'001), milliseconds::max(), milliseconds::min()})
    EXPECT_THROW(deadline_of(asked), UsageError) << asked.count();
}

TEST(Launch, RefusesNumbersThatCannotBe) {
  for (const char* size : {"0", "-4", "2147483648", "1000001"})
    EXPECT_THROW(launch_of({{"RANK", "0"}, {"WORLD_SIZE", size}, {"MASTER_ADDR", "a"}}), UsageError)
        << size;
  EXPECT_THROW(launch_of({{"OMPI_COMM_WORLD_SIZE", "four"}, {"OMPI_COMM_WORLD_RANK", "0"}}),
               UsageError);
  EXPECT_THROW(launch_of({{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_RANK", "4"}}),
               UsageError);
  EXPECT_THROW(launch_of({{"PMIX_RANK", "one"}}), UsageError);
  EXPECT_THROW(launch_of({{"WORLD_SIZE", "some"}}), UsageError);
  EXPECT_THROW(launch_of({{"RANK", "-1"}}), UsageError);
  EXPECT_THROW(launch_of({{"RANK", "4"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "a"}}), UsageError);
  EXPECT_THROW(launch_of({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}}), UsageError);
}

}  // namespace
}  // namespace longspan
