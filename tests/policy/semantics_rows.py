"""The rows of the worker's semantics, and the tests that hold each: kept (K), modernised (M) or
dropped (D). A test's docstring names its row."""

CONSTRUCTION = "test_worker_construction"
SAMPLING = "test_worker_sampling"
AGENTS = "test_worker_multi_agent"
IO = "test_worker_io"
METHODS = "test_worker_methods"
STATE = "test_worker_state"
RUNNER = "test_env_runner"
RAY = "test_worker_group"
PARALLEL = "test_data_parallel"

# row -> (K, M or D; the files whose tests name it)
ROWS = {
    # construction
    "as_remote(num_cpus, num_gpus, memory, object_store_memory, resources)": ("M", [RAY]),
    "env_creator(EnvContext), env_config, worker_index, vector_index, remote": (
        "K",
        [CONSTRUCTION],
    ),
    "policy: class or {id: (cls, obs_space, act_space, config)}": ("K", [CONSTRUCTION]),
    "policy_mapping_fn(agent_id)": ("K", [AGENTS]),
    "policies_to_train": ("K", [AGENTS]),
    "several policies but env not multi-agent": ("K", [CONSTRUCTION]),
    "tf_session_creator, tf paths, import_policy_model_from_h5": ("D", [CONSTRUCTION]),
    "batch_steps / rollout_fragment_length = 100": ("K", [SAMPLING]),
    'batch_mode="truncate_episodes"': ("K", [SAMPLING]),
    'batch_mode="complete_episodes"': ("K", [SAMPLING]),
    "episode_horizon": ("M", [SAMPLING]),
    "soft_horizon": ("K", [SAMPLING]),
    "no_done_at_end": ("K", [SAMPLING, AGENTS]),
    "preprocessor_pref, preprocessors": ("M", [CONSTRUCTION]),
    "observation_filter NoFilter / MeanStdFilter / ConcurrentMeanStdFilter": (
        "K",
        [CONSTRUCTION, "test_filters"],
    ),
    "sync_filters(new) / get_filters(flush_after)": ("K", [METHODS]),
    "clip_rewards": ("M", [SAMPLING]),
    "clip_actions=True": ("K", [SAMPLING]),
    "compress_observations": ("M", [SAMPLING]),
    "callbacks": ("K", [SAMPLING]),
    "input_creator(ioctx) / output_creator(ioctx)": ("K", [IO]),
    "input_evaluation: is / wis / simulation": ("M", [IO]),
    "sample_async": ("K", [SAMPLING]),
    "num_envs, VectorEnv": ("K", [SAMPLING]),
    "remote_worker_envs, remote_env_batch_wait_ms, async_remote_worker_envs": ("M", [SAMPLING]),
    "observation_fn": ("K", [AGENTS]),
    "seed": ("M", [CONSTRUCTION]),
    "monitor_path": ("M", [CONSTRUCTION]),
    "log_dir, log_level, extra_python_environs, fake_sampler": ("K", [CONSTRUCTION]),
    "model_config, policy_config": ("K", [CONSTRUCTION]),
    "EnvRunner(*, config, **kw)": ("K", [RUNNER]),
    "_try_env_reset": ("M", [RUNNER]),
    "_try_env_step": ("M", [RUNNER]),
    "_convert_to_tensor": ("K", [RUNNER]),
    # methods
    "sample()": ("K", [METHODS]),
    "sample_with_count()": ("K", [METHODS]),
    "get_weights(policies=None) / set_weights(weights, global_vars=None)": ("K", [METHODS]),
    "set_global_vars / get_global_vars": ("K", [METHODS]),
    "compute_gradients(samples)": ("K", [METHODS, AGENTS]),
    "apply_gradients(grads)": ("K", [METHODS]),
    "learn_on_batch(samples)": ("K", [METHODS, AGENTS]),
    "sample_and_learn(expected_batch_size, num_sgd_iter, sgd_minibatch_size, standardize_fields)": (
        "K",
        [METHODS],
    ),
    "get_metrics()": ("K", [METHODS]),
    "foreach_env, get_policy (None if unknown), for_policy, foreach_policy(func(policy, pid)), "
    "foreach_trainable_policy": ("K", [METHODS]),
    "save() / restore(bytes)": ("M", [STATE]),
    'export_policy_model(dir), export_policy_checkpoint(dir, prefix="model")': ("K", [STATE]),
    "stop(), __del__": ("K", [METHODS]),
    "creation_args()": ("K", [METHODS]),
    "setup_torch_data_parallel(url, world_rank, world_size, backend)": ("K", [PARALLEL]),
    "get_node_ip(), find_free_port()": ("K", [METHODS]),
    "iterator base (ParallelIteratorWorker)": ("M", [METHODS]),
    "split_by_episode": ("M", [METHODS]),
    "concat_samples / shuffle / slice / rows / columns / copy / compress": ("K", [METHODS]),
}
