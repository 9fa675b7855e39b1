// SPDX-License-Identifier: Apache-2.0
// What one layout saved, any other goes on from as if nothing had happened.
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <string>

#include "lockstep/checkpoint/background_saver.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/formats/checkpoint_reader.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/io/crc32c.h"
#include "tests/parallel/pipeline/training.h"
#include "tests/support/sampling.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using checkpoint::slices_of;
using parallel::ShardingStrategy;

const int kSaved = tests_all() ? 10 : 2, kEnd = 2 * kSaved;

struct Layout {
  std::string name;
  layout::ParallelDims dims = {};
  std::optional<ShardingStrategy> shard = std::nullopt;
  int chunks = 1;
  bool sequence_parallel = false;
  bool flat = false;     // the optimizer has one tensor for each unit, where none is tied
  bool tensors = false;  // ranks share whole tensors
};

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all = {
      {.name = "one"},
      {.name = "dp4", .dims = {.dp = 4}},
      {.name = "full2", .dims = {.dp = 2}, .shard = ShardingStrategy::full_shard},
      {.name = "full3", .dims = {.dp = 3}, .shard = ShardingStrategy::full_shard, .flat = true},
      {.name = "hybrid4", .dims = {.dp = 4}, .shard = ShardingStrategy::hybrid_shard},
      {.name = "optimizer4", .dims = {.dp = 4}, .shard = ShardingStrategy::optimizer},
      {.name = "tensors3",
       .dims = {.dp = 3},
       .shard = ShardingStrategy::optimizer,
       .flat = true,
       .tensors = true},
      // The tied embedding is the 27th tensor of the last stage, yet has the first stage's owner.
      {.name = "tensors3pp2",
       .dims = {.dp = 3, .pp = 2},
       .shard = ShardingStrategy::optimizer,
       .tensors = true},
      {.name = "tensors2pp2",
       .dims = {.dp = 2, .pp = 2},
       .shard = ShardingStrategy::optimizer,
       .tensors = true},
      {.name = "pp4", .dims = {.pp = 4}},
      {.name = "pp2x2", .dims = {.pp = 2}, .chunks = 2},
      {.name = "tp2", .dims = {.tp = 2}, .sequence_parallel = true},
      {.name = "tp4", .dims = {.tp = 4}},
      {.name = "tp2pp2", .dims = {.tp = 2, .pp = 2}},
      {.name = "grad2pp2",
       .dims = {.dp = 2, .pp = 2},
       .shard = ShardingStrategy::shard_grad_op,
       .flat = true},
      {.name = "3d",
       .dims = {.dp = 2, .tp = 2, .pp = 2},
       .shard = ShardingStrategy::full_shard,
       .sequence_parallel = true}};
  return all;
}

const Layout& layout_of(const std::string& name) {
  for (const Layout& layout : layouts()) {
    if (layout.name == name) return layout;
  }
  throw std::logic_error(name);
}

struct Kind {
  bool llama, tied, reproducible;
  int microbatches;  // in each step, of all ranks
  optim::MomentType moments = optim::MomentType::float32;
};

PipelineCase make(const Layout& layout, const Kind& kind) {
  PipelineCase c{
      .schedule = layout.chunks > 1 ? PipelineSchedule::interleaved : PipelineSchedule::one_f_one_b,
      .ranks = layout.dims.pp,
      .dp = layout.dims.dp,
      .tp = layout.dims.tp,
      .sequence_parallel = layout.sequence_parallel,
      .chunks = layout.chunks,
      .microbatches = kind.microbatches / layout.dims.dp,
      .llama = kind.llama,
      .tied = kind.tied,
      .reproducible = kind.reproducible,
      .steps = kEnd,
      .layers = 4,
      .adamw = {.lr = 1e-3, .moments = kind.moments, .seed = 3}};
  if (!layout.shard) return c;
  c.shard = parallel::FullyShardOptions{.strategy = *layout.shard,
                                        .units = units_of_language_model(),
                                        .min_num_params = 1,
                                        .use_orig_params = !layout.flat || kind.tied,
                                        .reproducible = kind.reproducible};
  if (layout.tensors) c.shard->advanced.granularity = parallel::ShardGranularity::tensors;
  if (*layout.shard == ShardingStrategy::hybrid_shard) c.shard->advanced.hybrid_group_size = 2;
  return c;
}

std::vector<checkpoint::NamedSlice> all_of(const parallel::Pipeline& pipeline,
                                           optim::Optimizer& optimizer) {
  return checkpoint::state(pipeline, optimizer);
}

// Checksums of all tensors, whole.
std::map<std::string, uint32_t> hashes(const std::string& path) {
  formats::CheckpointReader reader(path);
  std::map<std::string, uint32_t> all;
  for (const auto& [name, tensor] : reader.manifest().tensors) {
    std::vector<std::byte> bytes(
        static_cast<size_t>(formats::byte_size(tensor.dtype, tensor.shape).value()));
    reader.read(name, layout::Box::whole(tensor.shape), bytes);
    all[name] = io::crc32c(bytes);
  }
  return all;
}

// Runs of each layout, which saved half-way and went on.
class LayoutRuns {
 public:
  explicit LayoutRuns(const Kind& kind) : kind_(kind) {}

  struct LayoutRun {
    PipelineCurve curve;
    std::string checkpoint;
  };

  const LayoutRun& unbroken(const std::string& name) {
    const auto found = runs_.find(name);
    if (found != runs_.end()) return found->second;
    const std::string dir = folder_.path() + "/" + name;
    const PipelineCase c = make(layout_of(name), kind_);
    LayoutRun run;
    comm::run_threads(c.world(), [&](const comm::Group& world) {
      // Written while the next steps change everything that is saved.
      checkpoint::Saver saver(dir, world);
      auto mine = train_pipeline(
          c, world, [&](int step, const parallel::Pipeline& pipeline, optim::Optimizer& optimizer) {
            if (step == kSaved) saver.save({.step = step, .slices = all_of(pipeline, optimizer)});
          });
      saver.wait();
      if (world.rank() == 0) run.curve = std::move(mine.curve);
    });
    run.checkpoint = dir + "/" + formats::step_folder_name(kSaved);
    return runs_.emplace(name, std::move(run)).first->second;
  }

  // Losses and norms of the second half in the layout `to`, from what `from` saved.
  PipelineCurve resumed(const std::string& from, const std::string& to) {
    const std::string path = unbroken(from).checkpoint;
    const std::string again = folder_.path() + "/" + from + "-" + to;
    PipelineCase c = make(layout_of(to), kind_);
    c.first_step = kSaved;
    PipelineCurve curve;
    comm::run_threads(c.world(), [&](const comm::Group& world) {
      auto mine = train_pipeline(
          c, world, [&](int step, const parallel::Pipeline& pipeline, optim::Optimizer& optimizer) {
            if (step != kSaved) return;
            const auto slices = all_of(pipeline, optimizer);
            checkpoint::load(path, slices, world);
            checkpoint::save(again, {.step = step, .slices = slices}, world);
          });
      if (world.rank() == 0) curve = std::move(mine.curve);
    });
    EXPECT_EQ(hashes(again + "/" + formats::step_folder_name(kSaved)), hashes(path))
        << from << " to " << to;
    return curve;
  }

 private:
  const Kind kind_;
  const TempDir folder_;
  std::map<std::string, LayoutRun> runs_;
};

std::vector<double> later(const std::vector<double>& values) {
  return {values.begin() + kSaved, values.end()};
}

using Pairs = std::vector<std::pair<std::string, std::string>>;

LayoutRuns& gpt() {
  static LayoutRuns runs({.llama = false, .tied = true, .reproducible = false, .microbatches = 12});
  return runs;
}

TEST(CheckpointLayouts, AnyLayoutResumesInAnyOther) {
  LayoutRuns& runs = gpt();
  const PipelineCurve& expected = runs.unbroken("one").curve;
  const Pairs pairs = {{"one", "dp4"},
                       {"dp4", "one"},
                       {"full3", "tp2pp2"},
                       {"tp2pp2", "full3"},
                       {"pp4", "3d"},
                       {"3d", "pp4"},
                       {"one", "3d"},
                       {"3d", "one"},
                       {"tp4", "full2"},
                       {"full2", "tp4"},
                       {"hybrid4", "tp2"},
                       {"tp2", "hybrid4"},
                       {"tp4", "tp2"},
                       {"pp2x2", "full3"},
                       {"optimizer4", "pp2x2"},
                       {"grad2pp2", "tp2pp2"},
                       {"tensors3", "optimizer4"},
                       {"full2", "tensors3"},
                       {"tensors3", "tensors3pp2"}};
  for (size_t i = 0; i < pairs.size(); i += tests_all() ? 1 : 2) {
    const auto& [from, to] = pairs[i];
    SCOPED_TRACE(from + " to " + to);
    const PipelineCurve found = runs.resumed(from, to);
    expect_near_each(found.losses, later(expected.losses), "loss");
    expect_near_each(found.norms, later(expected.norms), "norm");
  }
}

TEST(CheckpointLayouts, TheSameLayoutResumesBitForBit) {
  LayoutRuns& runs = gpt();
  for (const char* name : {"one", "dp4", "full3", "pp2x2", "tp2", "3d"}) {
    SCOPED_TRACE(name);
    const PipelineCurve found = runs.resumed(name, name);
    const PipelineCurve& expected = runs.unbroken(name).curve;
    EXPECT_EQ(found.losses, later(expected.losses));
    EXPECT_EQ(found.norms, later(expected.norms));
  }
}

TEST(CheckpointLayouts, ReproducibleRunsResumeBitForBitWhereOnlyDataShardsAndStagesDiffer) {
  LayoutRuns runs({.llama = true, .tied = false, .reproducible = true, .microbatches = 8});
  const PipelineCurve& expected = runs.unbroken("one").curve;
  const Pairs pairs = {{"one", "dp4"},          {"dp4", "pp4"},       {"pp4", "full2"},
                       {"full2", "one"},        {"hybrid4", "pp2x2"}, {"pp2x2", "optimizer4"},
                       {"one", "grad2pp2"},     {"grad2pp2", "dp4"},  {"one", "tensors2pp2"},
                       {"tensors2pp2", "full2"}};
  for (const auto& [from, to] : pairs) {
    SCOPED_TRACE(from + " to " + to);
    const PipelineCurve found = runs.resumed(from, to);
    EXPECT_EQ(found.losses, later(expected.losses));
    EXPECT_EQ(found.norms, later(expected.norms));
  }
}

// Elements of the two moments that differ between two checkpoints, as a part of all.
double other_moments(const std::string& path, const std::string& expected) {
  formats::CheckpointReader reader(path), reference(expected);
  int64_t all = 0, other = 0;
  for (const auto& [name, tensor] : reader.manifest().tensors) {
    if (name.find(".exp_avg") == std::string::npos) continue;
    EXPECT_EQ(tensor.dtype, "BF16") << name;
    const auto box = layout::Box::whole(tensor.shape);
    std::vector<uint16_t> a(static_cast<size_t>(box.numel())), b(a.size());
    reader.read(name, box, std::as_writable_bytes(std::span(a)));
    reference.read(name, box, std::as_writable_bytes(std::span(b)));
    all += box.numel();
    for (size_t i = 0; i < a.size(); ++i) other += a[i] != b[i] ? 1 : 0;
  }
  EXPECT_GT(all, 0);
  return static_cast<double>(other) / static_cast<double>(all);
}

// A third would differ with other random numbers.
TEST(CheckpointLayouts, MomentsInBfloat16AreRoundedAsInOneProcess) {
  LayoutRuns runs({.llama = true,
                   .tied = false,
                   .reproducible = true,
                   .microbatches = 8,
                   .moments = optim::MomentType::bfloat16});
  const auto& [expected, one] = runs.unbroken("one");
  for (const char* name : {"dp4", "pp2x2", "hybrid4", "grad2pp2", "tensors2pp2"}) {
    SCOPED_TRACE(name);
    EXPECT_EQ(hashes(runs.unbroken(name).checkpoint), hashes(one));
    EXPECT_EQ(runs.unbroken(name).curve.losses, expected.losses);
  }
  // Products of parts round otherwise.
  for (const char* name : {"tp2", "tp2pp2", "3d"}) {
    SCOPED_TRACE(name);
    EXPECT_LT(other_moments(runs.unbroken(name).checkpoint, one), 0.01);
    expect_near_each(runs.unbroken(name).curve.losses, expected.losses, "loss");
  }
  for (const auto& [from, to] : Pairs{{"hybrid4", "grad2pp2"}, {"tensors2pp2", "one"}}) {
    SCOPED_TRACE(from + " to " + to);
    EXPECT_EQ(runs.resumed(from, to).losses, later(expected.losses));
  }
  EXPECT_EQ(runs.resumed("3d", "3d").losses, later(runs.unbroken("3d").curve.losses));
}

// The model has been used since: the next evaluation, and the next step, have the values that were
// loaded on every rank.
TEST(CheckpointLayouts, LoadedIntoAModelInUse) {
  for (const char* name : {"full3", "hybrid4", "optimizer4", "pp2x2", "grad2pp2", "3d"}) {
    const TempDir folder;
    const Layout layout = layout_of(name);
    PipelineCase c =
        make(layout, {.llama = false, .tied = true, .reproducible = false, .microbatches = 12});
    c.steps = 5;
    c.dropout = 0;
    comm::run_threads(c.world(), [&](const comm::Group& world) {
      std::string path;
      std::vector<double> saved;
      train_pipeline(c, world, [&](int step, parallel::Pipeline pipeline, optim::Optimizer& adamw) {
        const auto evaluate = [&] {
          pipeline.eval();
          const at::Tensor losses = pipeline.evaluate(
              {.inputs = [&](int i) { return parallel::Tensors{tokens(1000 + i, c.device).input}; },
               .loss =
                   [&](int i, const parallel::Tensors& outputs) {
                     return loss_of(outputs[0], tokens(1000 + i, c.device), 1,
                                    pipeline.tensor().group());
                   }},
              4);
          pipeline.train();
          return std::vector<double>(losses.data_ptr<double>(),
                                     losses.data_ptr<double>() + losses.numel());
        };
        if (step == 1) {
          saved = evaluate();
          path = checkpoint::save(folder.path(), {.step = step, .slices = all_of(pipeline, adamw)},
                                  world);
        } else if (step > 2) {
          EXPECT_NE(evaluate(), saved) << name;
          checkpoint::load(path, slices_of(pipeline), world, {.may_ignore = {"optim."}});
          EXPECT_EQ(evaluate(), saved) << name << " before step " << step;
        }
      });
    });
  }
}

}  // namespace
}  // namespace lockstep::test
