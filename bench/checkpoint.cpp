// SPDX-License-Identifier: Apache-2.0
// How fast checkpoints are written and read, and how long a save in the background holds training
// up; bench/checkpoint.py runs it next to dd.
// build/bin/bench_checkpoint save|load|async FOLDER [MEGABYTES] [DEVICE]
//
// One JSON line. save: a checkpoint of tensors of 64 MiB, on disk when the time ends. load: the
// newest of the folder, checksums compared. async: the time until Saver::save() returns, the second
// time on, next to that of a plain copy of the same tensors to memory that was used before.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "lockstep/checkpoint/background_saver.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"

using namespace lockstep;

namespace {

constexpr int64_t kTensor = 64 << 20;

// Random bits: disks may be faster with what repeats itself.
std::vector<checkpoint::NamedSlice> state(int64_t megabytes, c10::Device device, bool random) {
  std::vector<checkpoint::NamedSlice> slices;
  for (int64_t i = 0; i < std::max<int64_t>(1, (megabytes << 20) / kTensor); ++i) {
    at::Tensor tensor = at::ones({1024, kTensor / 4096}, at::TensorOptions(device));
    if (random) tensor.view(at::kLong).random_();
    slices.push_back(
        {layout::Placement::whole("t" + std::to_string(i), tensor.sizes().vec()), tensor});
  }
  return slices;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void time_background(const std::string& folder, const std::vector<checkpoint::NamedSlice>& slices) {
  std::vector<at::Tensor> copies;
  for (const auto& slice : slices) {
    copies.push_back(at::zeros(
        slice.tensor.sizes(), at::TensorOptions(at::kFloat).pinned_memory(slice.tensor.is_cuda())));
  }
  std::vector<double> copy, stall, whole;
  checkpoint::Saver saver(folder);
  for (int64_t i = 0; i < 5; ++i) {
    auto start = Clock::now();
    for (size_t t = 0; t < slices.size(); ++t) copies[t].copy_(slices[t].tensor);
    copy.push_back(seconds_since(start));
    start = Clock::now();
    saver.save({.step = i, .slices = slices, .keep = 1});
    if (i > 0) stall.push_back(seconds_since(start));
    saver.wait();
    whole.push_back(seconds_since(start));
  }
  std::printf("{\"copy_s\": %.4f, \"stall_s\": %.4f, \"save_s\": %.4f}\n", median(copy),
              median(stall), median(whole));
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3)
    throw ConfigError("usage: bench_checkpoint save|load|async FOLDER [MEGABYTES] [DEVICE]");
  const std::string what = argv[1], folder = argv[2];
  const int64_t megabytes = argc > 3 ? std::atoll(argv[3]) : 2048;
  const auto slices = state(megabytes, c10::Device(argc > 4 ? argv[4] : "cpu"), what != "load");
  const auto start = Clock::now();
  if (what == "async") {
    time_background(folder, slices);
    return 0;
  }
  if (what == "save") {
    checkpoint::save(folder, {.step = 1, .slices = slices});
  } else if (what == "load") {
    checkpoint::load(checkpoint::newest(folder).value(), slices);
  } else {
    throw ConfigError("bench_checkpoint: " + what + " is not save, load or async");
  }
  std::printf("{\"seconds\": %.4f}\n", seconds_since(start));
  return 0;
} catch (const std::exception& failure) {
  std::fprintf(stderr, "bench_checkpoint: %s\n", failure.what());
  return 1;
}
