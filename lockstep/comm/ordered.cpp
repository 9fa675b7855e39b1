#include "lockstep/comm/ordered.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/tensor.h"
#include "lockstep/fabric/reduce.h"
#include "lockstep/layout/shard_math.h"

namespace lockstep::comm {
namespace {

// Every rank sums one block of the tensor; `flat` is contiguous and on the CPU.
class BlockSum final : public detail::Pending {
 public:
  BlockSum(at::Tensor flat, const Group& group, ReduceOptions options)
      : flat_(std::move(flat)), group_(group), options_(std::move(options)) {
    for (int rank = 0; rank < group.size(); ++rank)
      counts_.push_back(layout::balanced_range(flat_.numel(), group.size(), rank).size());
    begin_ = layout::balanced_range(flat_.numel(), group.size(), group.rank()).begin;
    const int64_t mine = counts_[static_cast<size_t>(group.rank())];
    blocks_ = at::empty({group.size(), mine}, flat_.options());
    exchange_ =
        all_to_all(blocks_, flat_, group,
                   {.input_counts = counts_,
                    .output_counts = std::vector<int64_t>(static_cast<size_t>(group.size()), mine),
                    .timeout = options_.timeout,
                    .tag = options_.tag});
  }

  void wait() override {
    if (done_) return;
    exchange_.wait();
    const int64_t mine = counts_[static_cast<size_t>(group_.rank())];
    const at::Tensor sum = flat_.narrow(0, begin_, mine);
    std::vector<const std::byte*> inputs;
    for (int rank = 0; rank < group_.size(); ++rank)
      inputs.push_back(detail::bytes_of(blocks_[rank]).data());
    std::byte* const output = detail::bytes_of(sum).data();
    fabric::reduce(detail::dtype_of(flat_, "all_reduce"), options_.op, {&output, 1}, inputs,
                   static_cast<size_t>(mine));
    all_gather(flat_, sum, group_,
               {.counts = counts_, .timeout = options_.timeout, .tag = options_.tag})
        .wait();
    done_ = true;
  }
  bool done() const override { return done_; }

 private:
  at::Tensor flat_, blocks_;
  Group group_;
  ReduceOptions options_;
  std::vector<int64_t> counts_;
  int64_t begin_ = 0;
  Work exchange_;
  bool done_ = false;
};

class CopiedBack final : public detail::Pending {
 public:
  CopiedBack(const at::Tensor& target, const Group& group, ReduceOptions options)
      : target_(target.detach()),
        host_(target_.to(at::kCPU).contiguous()),
        sum_(host_.view({-1}), group, std::move(options)) {}
  void wait() override {
    if (sum_.done()) return;
    sum_.wait();
    const c10::AutoGradMode no_grad(false);
    target_.copy_(host_);
  }
  bool done() const override { return sum_.done(); }

 private:
  at::Tensor target_, host_;
  BlockSum sum_;
};

}  // namespace

Work all_reduce_ordered(const at::Tensor& tensor, const Group& group, ReduceOptions options) {
  if (group.size() == 1 || group.impl().sums_in_rank_tree())
    return all_reduce(tensor, group, std::move(options));
  fabric::check_reducible(detail::dtype_of(tensor, "all_reduce"), options.op);
  if (tensor.device().is_cpu() && tensor.is_contiguous()) {
    return Work(std::make_shared<BlockSum>(tensor.detach().view({-1}), group, std::move(options)));
  }
  return Work(std::make_shared<CopiedBack>(tensor, group, std::move(options)));
}

}  // namespace lockstep::comm
