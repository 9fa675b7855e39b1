// SPDX-License-Identifier: Apache-2.0
// A program that has ranks already and gives them to Lockstep. Says what came of it.
//   adopt_rank gloo RANK SIZE FILE [die|null|BACKEND]   a c10d group that meets in FILE
//   adopt_rank mpi [null|single|unstarted|BACKEND]         all but rank 0 of mpirun, in reverse
//   order
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <csignal>
#include <cstdio>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lockstep/comm/backends/gloo/adopt_c10d.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/conformance/conformance.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel/data/ddp.h"
#ifdef LOCKSTEP_MPIRUN
#include "lockstep/comm/backends/mpi/adopt_mpi.h"
#endif

namespace lockstep {
namespace {

void use(const comm::Group& world) {
  for (const comm::ConformanceCheck& check : comm::conformance_checks())
    check.run(world.split(0, world.rank()));
  // On the adopted group itself those that leave it whole.
  for (const comm::ConformanceCheck& check : comm::conformance_checks()) {
    if (check.name.starts_with("ranks that disagree") || check.name.starts_with("so does"))
      continue;
    check.run(world);
  }
  torch::nn::Linear model(torch::nn::LinearOptions(1, 1).bias(false));
  auto ddp = parallel::ddp(model, world);
  ddp.forward(torch::full({1, 1}, 2.0 * world.rank())).sum().backward();
  std::printf("rank %d of %d, local %d of %d, backend %s, all checks hold, mean gradient %.1f\n",
              world.rank(), world.size(), world.local_rank(), world.local_size(),
              std::string(world.backend()).c_str(), model->weight.grad().item<double>());
}

void adopt_gloo(const std::vector<std::string>& words) {
  const int rank = std::stoi(words[0]), size = std::stoi(words[1]);
  const std::string what = words.size() > 3 ? words[3] : "";
  if (what == "null") comm::adopt(c10::intrusive_ptr<c10d::ProcessGroup>());
  auto options = c10d::ProcessGroupGloo::Options::create();
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  const auto engine = c10::make_intrusive<c10d::ProcessGroupGloo>(
      c10::make_intrusive<c10d::FileStore>(words[2], size), rank, size, options);
  const comm::Group world = comm::adopt(
      engine, {.backend = what.empty() || what == "die" ? "auto" : what, .check = true});
  if (what == "die") {
    if (rank == size - 1) raise(SIGKILL);
    comm::all_reduce(at::ones({10}), world).wait();
  }
  use(world);
  // The program goes on using its group.
  std::vector<at::Tensor> own{at::full({1}, rank + 1)};
  engine->allreduce(own)->wait();
  TORCH_CHECK(own[0].item<int>() == size * (size + 1) / 2);
}

#ifdef LOCKSTEP_MPIRUN
void adopt_mpi_comm(const std::vector<std::string>& words) {
  const std::string what = words.empty() ? "auto" : words[0];
  if (what == "unstarted") comm::adopt(MPI_COMM_WORLD);
  int level = 0;
  MPI_Init_thread(nullptr, nullptr, what == "single" ? MPI_THREAD_SINGLE : MPI_THREAD_MULTIPLE,
                  &level);
  {
    if (what == "null") comm::adopt(MPI_COMM_NULL);
    if (what == "single") comm::adopt(MPI_COMM_WORLD);
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, rank == 0 ? 0 : 1, -rank, &part);
    const comm::Group world = comm::adopt(part, {.backend = what, .check = true});
    TORCH_CHECK(rank == 0 ? world.size() == 1 : true);
    // A message of the program's own waits while ours pass.
    int size = 0, mine = 0, token = world.rank();
    MPI_Comm_size(part, &size);
    MPI_Request request;
    MPI_Irecv(&mine, 1, MPI_INT, (world.rank() + 1) % size, 1, part, &request);
    use(world);
    MPI_Send(&token, 1, MPI_INT, (world.rank() + size - 1) % size, 1, part);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    TORCH_CHECK(mine == (world.rank() + 1) % size);
  }
  MPI_Finalize();
}
#endif

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  using namespace lockstep;
  try {
    const std::vector<std::string> words(argv + 2, argv + argc);
#ifdef LOCKSTEP_MPIRUN
    if (argv[1] == std::string("mpi")) adopt_mpi_comm(words);
#endif
    if (argv[1] == std::string("gloo")) adopt_gloo(words);
    return 0;
  } catch (const PeerLost& lost) {
    std::fprintf(stderr, "lost rank %d: %s\n", lost.rank(), lost.what());
    return 3;
  } catch (const ConfigError& error) {
    std::fprintf(stderr, "config error: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
