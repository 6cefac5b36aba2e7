"""Private names of other packages that the package uses, each with a reason, tested versions, and a test.

``test_private_names.py`` compares the list with the code. The named test fails if a release changes the name. A user
then sees an error, unless the reason states another effect. Documented names that begin with an underscore, such as
``os._exit``, and the keys of tensors in checkpoints are not private names.
"""

from typing import NamedTuple


class Use(NamedTuple):
    """Use of a private name in a file of the package."""

    file: str
    name: str
    reason: str
    #: lowest and newest version with which the test passed
    versions: str
    #: file and function of the test that fails if the name changes
    test: str


TORCH = "torch 2.11.0 to 2.15.0"
MEANING = "test_private_names.py::test_private_names_of_torch_mean_what_the_package_expects"
HOOKS = "torch has no list of the hooks of a module, and copies and pickles lose the handles of hooks"
OPERATOR = "torch's counter of operations does not know the fused kernels with which networks run on a CPU"
PASSES = "backward", "backward_pre", "forward", "forward_pre"

USES = (
    Use("attention/blocks/projection.py", "_apply",
        "Module.to() calls nothing public; without it, DistributedDataParallel warns about the strides of gradients",
        TORCH, "attention/test_blocks.py::test_gradients_have_the_strides_of_their_parameters_in_channels_last"),
    Use("attention/graphs.py", "_C._functorch",
        "torch.func.debug_unwrap, the public way to recognize a transform, runs several functions in each call",
        TORCH, "attention/test_changes.py::test_random_calls_equal_those_of_a_new_block"),
    Use("attention/recomputation.py", "_C._current_graph_task_id",
        "nothing public distinguishes backward passes", TORCH, MEANING),
    Use("attention/recomputation.py", "_forward_cls",
        "nothing public relates the context of an autograd function to its forward method",
        TORCH, "networks/test_checkpointing.py::test_gradients_equal_those_without_checkpointing"),
    Use("attention/scopes.py", "EagerInScopes(str)",
        "the public stance force_eager applies to all threads, where models with fullgraph=True then raise an error",
        TORCH, "networks/test_threads.py::test_a_compiled_model_runs_in_eager_inside_and_compiled_in_another_thread"),
    Use("checks.py", "_version",
        "only the version shows a change in place without a comparison of values", TORCH, MEANING),
    Use("networks/checkpoints/folder.py", "_hub",
        "the public save_for_hf writes the weights as well; timm collects the arguments of a network in this function",
        "timm 1.0.26 to 1.0.31",
        "networks/checkpoints/test_saved.py::test_networks_that_timm_does_not_build_are_not_written"),
    Use("networks/convert/keras_layers.py", "_x_dense",
        "Keras has public names for the projections of one of its two classes", "keras 3.15.1",
        "networks/convert/test_convert.py::test_keras_multihead_attention"),
    Use("networks/convert/other_layers.py", "_attn_implementation",
        "transformers has a public method to set it, and none to read it", "transformers 5.24.0",
        "networks/convert/test_swap.py::test_layers_of_transformers_run_calls_that_the_block_does_not_support"),
    Use("networks/inspection/costs.py", "_subclasses",
        "tensors without values for the kernels of a CPU have no public class", TORCH,
        "networks/insertion/test_dry_run.py::test_counted_bytes_equal_those_that_autograd_saves"),
    Use("networks/inspection/example.py", "_pytree",
        "libraries register their outputs in this module of torch, which has no public name", TORCH, MEANING),
    Use("networks/inspection/costs.py", "_native_multi_head_attention", OPERATOR, TORCH, MEANING),
    Use("networks/inspection/costs.py", "_scaled_dot_product_flash_attention_for_cpu", OPERATOR, TORCH, MEANING),
    Use("networks/inspection/costs.py", "_transformer_encoder_layer_fwd", OPERATOR, TORCH, MEANING),
    *(Use("networks/inspection/network.py", f"_{name}_hooks", HOOKS, TORCH, MEANING) for name in PASSES),
    Use("networks/inspection/wrappers.py", "_orig_mod",
        "a part of keys in files; if it changes, sites and keys of compiled models have another prefix",
        TORCH, MEANING),
    Use("networks/safe/pickled.py", "_Unpickler",
        "the public reader, written in C, does not let a subclass refuse instructions or count values",
        "Python 3.11.7", "networks/safe/test_attacks.py::test_hostile_and_mutated_files_are_read_or_rejected"),
    Use("networks/safe/pickled.py", "_metadata",
        "an attribute in the files of torch.save; without it, options of blocks in new files are not compared", TORCH,
        "networks/checkpoints/test_checkpoints.py::test_a_single_block_is_compared_and_a_missing_configuration_is_reported"),
    Use("networks/safe/pickled.py", "_rebuild_",
        "functions that are named in the files of torch.save", TORCH,
        "networks/safe/test_safe.py::test_tensors_and_plain_values_are_read_and_other_objects_become_placeholders"),
)  # fmt: skip
