// SPDX-License-Identifier: Apache-2.0
// The peer for `lockstep bench collectives --backends mpi`: the same operations with MPI alone, no
// Lockstep and no torch. mpirun -n 2 build/bin/raw_mpi 4096 65536 4194304 67108864
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

int main(int argc, char** argv) {
  int level = 0, rank = 0, size = 1;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (rank == 0)
    std::printf("%-8s %-15s %12s %6s %12s\n", "raw mpi", "op", "bytes", "ranks", "p50 us");
  for (int i = 1; i < argc; ++i) {
    const long bytes = std::atol(argv[i]);
    const int count = static_cast<int>(bytes / 4), block = count / size;
    std::vector<float> whole(static_cast<size_t>(count)), other(static_cast<size_t>(count));
    const auto measure = [&](const char* name, double messages, const std::function<void()>& run) {
      const auto once = [&] {
        const double start = MPI_Wtime();
        run();
        return (MPI_Wtime() - start) * 1e6 / messages;
      };
      for (int k = 0; k < 3; ++k) once();
      double estimate = once();
      MPI_Allreduce(MPI_IN_PLACE, &estimate, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
      const int repeats =
          static_cast<int>(std::clamp(5e5 / std::max(estimate, 0.1), 20.0, 20000.0));
      std::vector<double> samples;
      for (int k = 0; k < repeats; ++k) samples.push_back(once());
      std::nth_element(samples.begin(), samples.begin() + repeats / 2, samples.end());
      double median = samples[static_cast<size_t>(repeats / 2)];
      MPI_Allreduce(MPI_IN_PLACE, &median, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
      if (rank == 0)
        std::printf("%-8s %-15s %12ld %6d %12.2f\n", "raw mpi", name, bytes, size, median);
    };
    measure("all_reduce", 1, [&] {
      MPI_Allreduce(MPI_IN_PLACE, whole.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    });
    measure("all_gather", 1, [&] {
      MPI_Allgather(other.data(), block, MPI_FLOAT, whole.data(), block, MPI_FLOAT, MPI_COMM_WORLD);
    });
    measure("reduce_scatter", 1, [&] {
      MPI_Reduce_scatter_block(whole.data(), other.data(), block, MPI_FLOAT, MPI_SUM,
                               MPI_COMM_WORLD);
    });
    measure("broadcast", 1, [&] { MPI_Bcast(whole.data(), count, MPI_FLOAT, 0, MPI_COMM_WORLD); });
    measure("all_to_all", 1, [&] {
      MPI_Alltoall(whole.data(), block, MPI_FLOAT, other.data(), block, MPI_FLOAT, MPI_COMM_WORLD);
    });
    measure("send_recv", 2, [&] {
      if (rank == 0) {
        MPI_Send(whole.data(), count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD);
        MPI_Recv(other.data(), count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      } else if (rank == 1) {
        MPI_Recv(other.data(), count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(whole.data(), count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD);
      }
    });
  }
  MPI_Finalize();
}
