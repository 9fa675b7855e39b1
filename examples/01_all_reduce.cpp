// SPDX-License-Identifier: Apache-2.0
// Every rank brings a tensor; all leave with the sum. Without the launcher the same code is a group
// of one.
//
// $ lockstep run -n 2 build/bin/01_all_reduce
// [rank0]: group of 2, sum: 3 3 3
//
// $ build/bin/01_all_reduce
// group of 1, sum: 1 1 1
#include <ATen/ATen.h>

#include <iostream>

#include "lockstep/lockstep.h"

int main() {
  using namespace lockstep;
  const comm::Group group = comm::init();
  at::Tensor numbers = at::full({3}, group.rank() + 1);
  comm::Work work = comm::all_reduce(numbers, group);  // runs while this thread continues
  work.wait();
  if (group.rank() == 0) {
    std::cout << "group of " << group.size() << ", sum:";
    for (int i = 0; i < 3; ++i) std::cout << ' ' << numbers[i].item<int64_t>();
    std::cout << '\n';
  }
}
