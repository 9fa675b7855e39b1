// SPDX-License-Identifier: Apache-2.0
// Gradients in full precision inside a host, compressed between hosts.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <condition_variable>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/control/host_groups.h"
#include "lockstep/core/format.h"
#include "lockstep/core/trace.h"
#include "lockstep/layout/shard_math.h"
#include "lockstep/parallel/data/gradient_hook.h"

namespace lockstep::parallel::hooks {
namespace {

// The steps of a bucket wait for each other, so a thread takes them, bucket by bucket, while
// backward continues.
class AcrossHosts {
 public:
  explicit AcrossHosts(GradientHook inner) : inner_(std::move(inner)) {}

  std::function<void()> reduce(GradientBucket& bucket, const comm::Group& group) {
    if (!groups_) groups_ = comm::split_by_host(group);
    const std::string tag = format("gradient bucket {}", bucket.index);
    if (groups_->hosts == 1) {
      return [work = comm::all_reduce(bucket.flat, group,
                                      {.op = comm::ReduceOp::avg, .tag = tag})]() mutable {
        work.wait();
      };
    }
    // The thread has no stream of a device that it would have to follow.
    const bool on_device = !bucket.flat.is_cpu();
    const at::Tensor host = on_device ? bucket.flat.to(at::kCPU) : bucket.flat;
    std::packaged_task<void()> task([this, index = bucket.index, host, tag, size = group.size()] {
      average(index, host, tag, size);
    });
    auto done = std::make_shared<std::future<void>>(task.get_future());
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(task));
      if (!thread_.joinable())
        thread_ = std::jthread([this, rank = group.members()[static_cast<size_t>(group.rank())]](
                                   std::stop_token stop) { work(std::move(stop), rank); });
      arrived_.notify_one();
    }
    return [done, group, on_device, host, flat = bucket.flat] {
      {
        const comm::BlockedTime time(group);
        done->get();
      }
      if (on_device) flat.copy_(host);
    };
  }

 private:
  void work(std::stop_token stop, int rank) {
    trace::name_thread(rank, "gradients across hosts");
    const c10::AutoGradMode no_grad(false);
    const comm::ExcludeBlockedTime exclude;  // who waits for this thread counts
    std::unique_lock lock(mutex_);
    while (arrived_.wait(lock, stop, [this] { return !queue_.empty(); })) {
      std::packaged_task<void()> task = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  void average(int index, const at::Tensor& flat, const std::string& tag, int size) const {
    const auto& [inside, across, hosts, places] = *groups_;
    // Every place that all hosts have takes an equal share of the bucket.
    std::vector<int64_t> counts(static_cast<size_t>(inside.size()), 0);
    for (int place = 0; place < places; ++place)
      counts[static_cast<size_t>(place)] =
          layout::balanced_range(flat.numel(), places, place).size();
    const bool carries = inside.rank() < places;
    const auto range = layout::balanced_range(flat.numel(), places, carries ? inside.rank() : 0);
    const at::Tensor share = flat.narrow(0, range.begin, carries ? range.size() : 0);
    comm::reduce_scatter(share, flat, inside, {.counts = counts, .tag = tag}).wait();
    if (carries && share.numel() > 0) {
      // What is averaged over hosts: their sums, as if each had an equal share of the ranks.
      share.mul_(static_cast<double>(hosts) / size);
      if (inner_) {
        GradientBucket part{.index = index, .flat = share, .names = {tag}, .gradients = {share}};
        if (const auto complete = inner_(part, across)) complete();
      } else {
        comm::all_reduce(share, across, {.op = comm::ReduceOp::avg, .tag = tag}).wait();
      }
    }
    comm::all_gather(flat, share, inside, {.counts = counts, .tag = tag}).wait();
  }

  GradientHook inner_;
  std::optional<comm::HostGroups> groups_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable_any arrived_;
  std::deque<std::packaged_task<void()>> queue_;
  std::jthread thread_;
};

}  // namespace

GradientHook across_hosts(GradientHook inner) {
  return [state = std::make_shared<AcrossHosts>(std::move(inner))](GradientBucket& bucket,
                                                                   const comm::Group& group) {
    return state->reduce(bucket, group);
  };
}

}  // namespace lockstep::parallel::hooks
