// A rank for tests of init(): says who it is and what it sums up to.
//   init_rank [BACKEND [ELEMENTS [STRATEGY]]]
#include <ATen/ATen.h>

#include <cstdio>
#include <cstdlib>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  try {
    const comm::Group world =
        comm::init({.backend = argc > 1 ? argv[1] : "auto",
                    .strategy = layout::parse_comm_strategy(argc > 3 ? argv[3] : "all-reduce")});
    at::Tensor sum = at::full({argc > 2 ? std::atol(argv[2]) : 3}, world.rank() + 1, at::kLong);
    comm::all_reduce(sum, world).wait();
    std::printf("rank %d of %d, local %d of %d, backend %s, sum %ld\n", world.rank(), world.size(),
                world.local_rank(), world.local_size(), std::string(world.backend()).c_str(),
                sum[0].item<int64_t>());
    return 0;
  } catch (const ConfigError& error) {
    std::fprintf(stderr, "config error: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
