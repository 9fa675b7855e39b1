// SPDX-License-Identifier: Apache-2.0
// The copy of CUDA tensors is complete when save() returns.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "lockstep/checkpoint/background_saver.h"
#include "tests/support/subprocess.h"

namespace lockstep::checkpoint {
namespace {

TEST(SaverCuda, SavesWhatWasThereAtTheCall) {
  const test::TempDir folder;
  const auto device = at::TensorOptions(at::kCUDA);
  const at::Tensor a = at::rand({30000, 1000}, device), b = at::rand({300, 7}, device).t(),
                   flags = at::rand({13}, device) > 0.5;
  const std::vector<at::Tensor> tensors = {a, b, flags};
  std::vector<NamedSlice> slices, targets;
  std::vector<at::Tensor> before;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto placement =
        layout::Placement::whole("t" + std::to_string(i), tensors[i].sizes().vec());
    slices.push_back({placement, tensors[i]});
    targets.push_back({placement, at::zeros_like(tensors[i])});
    before.push_back(tensors[i].clone());
  }
  Saver saver(folder.path());
  for (int64_t step = 1; step <= 2; ++step) {
    for (size_t i = 0; i < tensors.size(); ++i) tensors[i].copy_(before[i]);
    saver.save({.step = step, .slices = slices});
    for (const at::Tensor& tensor : tensors) tensor.zero_();
    saver.wait();
    load(saver.take_finished()[0].path, targets);
    for (size_t i = 0; i < tensors.size(); ++i)
      EXPECT_TRUE(at::equal(targets[i].tensor, before[i])) << step << " " << i;
  }
}

}  // namespace
}  // namespace lockstep::checkpoint
