// SPDX-License-Identifier: Apache-2.0
// Keys, ranges and help lines of what a run writes: checkpoints, metrics, its folder.
#include "lockstep/config/train_output_schema.h"

namespace lockstep::config {

void add_output(Schema& schema, TrainConfig& config) {
  schema.section("checkpoint", "Checkpoints");
  schema.add("dir", config.checkpoint.dir,
             "Folder for checkpoints. auto: checkpoints in run.dir. Empty: no checkpoint is "
             "written.");
  schema.add("every", config.checkpoint.every,
             "Steps between checkpoints; 0 saves only after the last step.", kFromZero);
  schema.add("keep", config.checkpoint.keep, "Number of newest checkpoints to keep; 0 keeps all.",
             kFromZero);
  schema.add("best", config.checkpoint.best,
             "Also save and keep the checkpoint with the lowest validation loss; the link best in "
             "checkpoint.dir names it. Needs train.eval_every.");
  schema.add(
      "resume", config.checkpoint.resume,
      "Run or checkpoint to resume from. none: start a new run. auto: resume from the "
      "newest checkpoint in checkpoint.dir, if there is one. Otherwise a path. A run folder: "
      "continue it, with its configuration. A checkpoint in a run folder, or RUN/best: a new "
      "run with that configuration. Any other checkpoint: a new run with its model and "
      "tokenizer, unless they are set.");
  schema.add_choice("load", config.checkpoint.load, {"all", "model"},
                    "What to load from checkpoint.resume. all: resume the run at its step. model: "
                    "load the weights only and start at step 0, with the checkpoint's model and "
                    "tokenizer unless they are set.");
  schema.add("partial", config.checkpoint.partial,
             "Load the tensors that match. Missing tensors, unknown tensors and other shapes are a "
             "warning instead of an error.");
  schema.add("other_data", config.checkpoint.other_data,
             "Allow resuming with other training data than the checkpoint's, which is an error by "
             "default.");
  schema.add("async", config.checkpoint.async,
             "Write checkpoints concurrently with training. Each rank needs memory for a copy of "
             "the data that it writes.");
  schema.add_choice("when_busy", config.checkpoint.when_busy, {"wait", "skip"},
                    "checkpoint.async only: wait for the previous checkpoint if it is still being "
                    "written, or skip this one. The last checkpoint is never skipped.");

  schema.section("metrics", "Metrics and traces");
  schema.add("file", config.metrics.file,
             "File of metrics, a JSON line per step. auto: metrics.jsonl in run.dir. Empty: none.");
  schema.add("trace", config.metrics.trace,
             "Folder for Chrome traces, one file per rank. auto: traces in run.dir. Empty: none.");
  schema.add("tensorboard", config.metrics.tensorboard,
             "Folder for TensorBoard event files. auto: tensorboard in run.dir. Empty: none.");
  schema.add("health_every", config.metrics.health_every,
             "Steps between records of each layer's gradients and weights; 0: none.", kFromZero);
  schema.add("sample_tokens", config.metrics.sample_tokens,
             "Tokens of text to generate after each validation; 0: none.", kFromZero);
  schema.add("sample_prompt", config.metrics.sample_prompt, "Text that sample_tokens continues.");

  schema.section("run", "Run folder");
  schema.add("dir", config.run.dir,
             "Folder for all files of the run. auto: a new folder runs/DATE-TIME-MODEL. Empty: "
             "none.");
  schema.add("ranks", config.run.ranks,
             "Number of ranks to start on this machine, as -n; ignored under another launcher. 0: "
             "one rank.",
             kFromZero);
  schema.add(
      "min_ranks", config.run.min_ranks,
      "With -n: the run continues with as few ranks after others have failed, as -n MIN:MAX; "
      "0: with all only. docs/recovery.md.",
      kFromZero);
  schema.add("grow_after", config.run.grow_after,
             "With -n MIN:MAX: seconds until a rank's place is used again after it has failed; "
             "doubled each time that it fails, up to an hour.",
             {.min = 1, .max = 86400});
  schema.add("max_restarts", config.run.max_restarts,
             "With -n: start all ranks again after one has failed, at most so many times in an "
             "hour. They continue from the newest checkpoint.",
             kFromZero);
  schema.add_choice(
      "recovery", config.run.recovery, {"checkpoint", "memory"},
      "What ranks that are started again continue from. checkpoint: the newest checkpoint. memory: "
      "copies of their state in host memory, at most one step old; the checkpoint where there is "
      "no such copy. docs/recovery.md.");
  schema.add("grace", config.run.grace,
             "With -n: after a signal to stop, kill ranks that show no sign of life for so many "
             "seconds (or for three times the longest step, if that is longer).",
             kFromZero);
}

}  // namespace lockstep::config
