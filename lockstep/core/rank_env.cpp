// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/rank_env.h"

#include <unistd.h>

#include <charconv>
#include <cstdlib>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep {
namespace {

int parse_int(const char* name, const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw ConfigError(format("environment: {}={} is not a whole number", name, text));
  }
  return value;
}

class Reader {
 public:
  explicit Reader(const RankEnv::Lookup& lookup) : lookup_(lookup) {}

  std::optional<std::string> text(const char* name) const {
    auto value = lookup_(name);
    if (value && value->empty()) return std::nullopt;
    return value;
  }
  std::optional<int> number(const char* name) const {
    const auto value = text(name);
    return value ? std::optional(parse_int(name, *value)) : std::nullopt;
  }

  struct Names {
    const char *rank, *size, *local_rank, *local_size;
  };
  // True, and `env` filled in, when both the rank and the world size are set.
  bool read_set(const Names& names, Launcher launcher, RankEnv& env) const {
    const auto rank = number(names.rank), size = number(names.size);
    if (!rank || !size) return false;
    env.launcher = launcher;
    env.rank = *rank;
    env.world_size = *size;
    env.local_rank = number(names.local_rank);
    env.local_size = number(names.local_size);
    if (env.world_size < 1 || env.rank < 0 || env.rank >= env.world_size) {
      throw ConfigError(format(
          "environment: {}={} and {}={}; the rank must be at least 0 and below the world size",
          names.rank, env.rank, names.size, env.world_size));
    }
    if (env.local_rank && env.local_size &&
        (*env.local_rank < 0 || *env.local_rank >= *env.local_size)) {
      throw ConfigError(
          format("environment: {}={} and {}={}; the local rank must be at least 0 and below the "
                 "local size",
                 names.local_rank, *env.local_rank, names.local_size, *env.local_size));
    }
    return true;
  }

 private:
  const RankEnv::Lookup& lookup_;
};

}  // namespace

std::string_view name_of(Launcher launcher) {
  constexpr std::string_view names[] = {"none",  "lockstep", "torchrun", "Open MPI",
                                        "MPICH", "MVAPICH",  "PMIx",     "Slurm"};
  return names[static_cast<size_t>(launcher)];
}

RankEnv RankEnv::detect() {
  return detect([](const char* name) -> std::optional<std::string> {
    const char* value = std::getenv(name);
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  });
}

RankEnv RankEnv::detect(const Lookup& lookup) {
  const Reader reader(lookup);
  RankEnv env;
  env.master_addr = reader.text("MASTER_ADDR").value_or("");
  // Some write an IPv6 address as it stands before a port.
  if (env.master_addr.starts_with('[') && env.master_addr.ends_with(']')) {
    env.master_addr = env.master_addr.substr(1, env.master_addr.size() - 2);
  }
  env.master_port = reader.number("MASTER_PORT").value_or(0);
  env.restart_count = reader.number("TORCHELASTIC_RESTART_COUNT").value_or(0);

  const Launcher torch_style =
      reader.text("LOCKSTEP_RENDEZVOUS") ? Launcher::lockstep : Launcher::torchrun;
  if (reader.read_set({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}, torch_style, env))
    return env;
  if (reader.read_set({"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                       "OMPI_COMM_WORLD_LOCAL_SIZE"},
                      Launcher::openmpi, env)) {
    return env;
  }
  if (reader.read_set({"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
                       "MV2_COMM_WORLD_LOCAL_SIZE"},
                      Launcher::mvapich, env)) {
    return env;
  }
  if (reader.read_set({"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
                      Launcher::mpich, env))
    return env;

  const auto step_size =
      reader.text("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  const auto slurm_host = [&] {
    const auto list = reader.text("SLURM_STEP_NODELIST") ? reader.text("SLURM_STEP_NODELIST")
                                                         : reader.text("SLURM_JOB_NODELIST");
    return list ? first_slurm_host(*list) : std::string();
  };
  if (reader.read_set({"PMIX_RANK", step_size, "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"},
                      Launcher::pmix, env)) {
    if (env.master_addr.empty()) env.master_addr = slurm_host();
    return env;
  }
  // Inside an sbatch script or an interactive shell without srun, SLURM_PROCID=0 and SLURM_NTASKS=N
  // are set although only one process runs: believing them would wait for N ranks for ever.
  const auto job = reader.text("SLURM_JOB_NAME").value_or("");
  const bool in_step = reader.text("SLURM_STEP_ID") || reader.text("SLURM_STEP_NUM_TASKS");
  if (in_step && job != "bash" && job != "interactive" &&
      reader.read_set({"SLURM_PROCID", step_size, "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"},
                      Launcher::slurm, env)) {
    if (env.master_addr.empty()) env.master_addr = slurm_host();
    // Steps of one job run at the same time, and may begin on the same host.
    if (env.master_port == 0) {
      const auto number = [&](const char* name) {
        return std::strtoull(reader.text(name).value_or("0").c_str(), nullptr, 10) % 10000;
      };
      env.master_port = static_cast<int>(
          15000 + (number("SLURM_JOB_ID") + 1009 * number("SLURM_STEP_ID")) % 10000);
    }
    return env;
  }
  env.launcher = Launcher::none;
  return env;
}

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

std::string first_slurm_host(std::string_view list) {
  // Take the first element: commas inside brackets do not end it; then the first number of every
  // bracket.
  std::string host;
  bool inside = false, take = true;
  for (const char c : list) {
    if (c == '[') {
      inside = take = true;
    } else if (c == ']') {
      inside = false;
      take = true;
    } else if (c == ',' && !inside) {
      break;
    } else if (inside && (c == ',' || c == '-')) {
      take = false;
    } else if (take) {
      host += c;
    }
  }
  return host;
}

}  // namespace lockstep
