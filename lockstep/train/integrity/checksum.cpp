// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/integrity/checksum.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <atomic>
#include <functional>

#include "lockstep/checkpoint/slices.h"

namespace lockstep::train {
namespace {

using detail::Words;

constexpr int64_t kCopied = int64_t{16} << 20;  // bytes that are copied at a time
constexpr int64_t kGrain = int64_t{1} << 18;    // words of a thread at least

uint64_t sum_of(const Words& words) {
  std::atomic<uint64_t> sum{0};
  at::parallel_for(0, words.count, kGrain, [&](int64_t begin, int64_t end) {
    const auto part = [&]<class Word>(const Word* data) {
      return detail::sum_of_words(data + begin, static_cast<uint64_t>(end - begin),
                                  words.first + static_cast<uint64_t>(begin));
    };
    sum += words.width == 4   ? part(static_cast<const uint32_t*>(words.data))
           : words.width == 2 ? part(static_cast<const uint16_t*>(words.data))
                              : part(static_cast<const uint8_t*>(words.data));
  });
  return sum;
}

// Pieces that are contiguous, in the order of the elements. The first dimensions of a piece have
// one element each, so its elements follow one another in the whole too.
void for_each_piece(const at::Tensor& tensor, uint64_t first,
                    const std::function<void(const at::Tensor&, const Words&)>& visit) {
  const auto size = static_cast<int64_t>(tensor.element_size());
  const int64_t width = size % 4 == 0 ? 4 : size % 2 == 0 ? 2 : 1;
  if (!tensor.is_contiguous() && tensor.numel() * size > kCopied) {
    int64_t dim = 0;
    while (tensor.size(dim) == 1) ++dim;
    const int64_t half = tensor.size(dim) / 2;
    const at::Tensor front = tensor.narrow(dim, 0, half);
    for_each_piece(front, first, visit);
    for_each_piece(tensor.narrow(dim, half, tensor.size(dim) - half),
                   first + static_cast<uint64_t>(front.numel() * size / width), visit);
    return;
  }
  checkpoint::open_to_read(tensor);  // encoded parameters have values only then
  const at::Tensor piece = tensor.contiguous();
  visit(piece, {piece.data_ptr(), width, piece.numel() * size / width, first});
}

}  // namespace

at::Tensor checksums(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(tensors.size());
  at::Tensor here = at::zeros({count}, at::kLong);
  std::vector<at::Tensor> elsewhere;  // sums of all tensors on one device each
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor tensor = tensors[static_cast<size_t>(i)].detach();
    at::Tensor there;
    if (!tensor.is_cpu()) {
      const auto known = std::find_if(elsewhere.begin(), elsewhere.end(), [&](const auto& sums) {
        return sums.device() == tensor.device();
      });
      there =
          known != elsewhere.end()
              ? *known
              : elsewhere.emplace_back(at::zeros({count}, here.options().device(tensor.device())));
    }
    for_each_piece(tensor, 0, [&](const at::Tensor& piece, const Words& words) {
      if (there.defined() && detail::add_sum_on_gpu(piece, words, there[i])) return;
      const at::Tensor near = piece.cpu();
      here.data_ptr<int64_t>()[i] += static_cast<int64_t>(
          sum_of(Words{near.data_ptr(), words.width, words.count, words.first}));
    });
  }
  for (const at::Tensor& sums : elsewhere) here.add_(sums.cpu());
  return here;
}

}  // namespace lockstep::train
