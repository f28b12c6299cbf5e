"""The configuration: typed, bounded, strict at every level, reloadable, refused on one line (BL-44, BL-68)."""

import dataclasses
import math
from pathlib import Path
from typing import ClassVar

import pytest

from ep_jax import cli, config, config_files
from ep_jax.fields import ConfigError, check, convert, convert_text, setting

ROOT = Path(__file__).parents[1]

# Every key a file or the command line may give. A new key is a decision: it is added here by hand.
ACCEPTED_KEYS = """
run_dir resume
train.steps train.seed train.sequences_per_step train.accumulation train.sequences_per_device
train.eval_every train.eval_sequences train.hang_timeout_s train.compilation_cache
mesh.replica mesh.fsdp mesh.ep mesh.domain_size
data.source data.path data.jsonl_field data.tokenizer data.sequence_length data.held_out_fraction data.cache_dir
data.verify data.prefetch
model.vocab_size model.num_layers model.model_dim model.num_heads model.num_kv_heads model.head_dim model.window
model.global_every model.rope_theta model.norm_epsilon model.latent_dim model.expert_hidden_dim
model.num_shared_experts model.shared_hidden_dim model.tie_embeddings model.init_std model.compute_dtype model.remat
model.scan
model.attention model.loss_chunk_tokens
router.num_experts router.experts_per_token router.scores router.balancing router.weight_sum router.histogram_bins
router.sign_bias_rate router.load_balance_coefficient router.z_loss_coefficient
ep.transport ep.sender_factor ep.receiver_factor ep.order ep.slots ep.receive ep.agreed ep.waves ep.schedule ep.rescale
ep.premix ep.updates_per_cell ep.payload ep.emulated_shards ep.kernels
optimizer.name optimizer.learning_rate optimizer.adam_learning_rate optimizer.schedule optimizer.warmup_steps
optimizer.decay_fraction optimizer.final_fraction optimizer.b1 optimizer.b2 optimizer.epsilon optimizer.weight_decay
optimizer.clip_norm optimizer.muon_momentum optimizer.muon_dtype
checkpoint.every checkpoint.keep checkpoint.asynchronous
profile.steps
log.every log.tensorboard log.drop_alarm log.wandb_project
trace.every
"""


def parse(*argv: str) -> config.RunConfig:
    return cli.parse_args(argv, command="python -m ep_jax.train", description="Trains.")


def refusal(function, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def toml(tmp_path):
    """Writes a TOML file and gives its path."""

    def write(text: str) -> str:
        path = tmp_path / "given.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def with_mesh(replica=1, fsdp=1, ep=1, **sections) -> config.RunConfig:
    """Defaults with a mesh and, per section, the given fields."""
    base = config.RunConfig()
    changed = {name: dataclasses.replace(getattr(base, name), **fields) for name, fields in sections.items()}
    mesh = dataclasses.replace(base.mesh, replica=replica, fsdp=fsdp, ep=ep)
    return dataclasses.replace(base, mesh=mesh, **changed)


# The keys


def test_accepted_keys_are_these():
    assert list(config.keys()) == ACCEPTED_KEYS.split()


def test_sections_are_named_as_their_dataclasses_say():
    for name, config_class in config.sections().items():
        assert name == config_class.SECTION
        assert config_class.__dataclass_params__.frozen


def test_every_key_can_be_given_on_the_command_line_and_survives_a_round_trip(toml):
    for key in config.keys().values():
        default = key.default
        if default is None:
            continue
        text = str(default).lower() if isinstance(default, bool) else str(default)
        if isinstance(default, tuple):
            text = config_files.toml_value(default)
        if key.name in ("run_dir", "resume"):
            text = default = "else where"
        given = parse(f"--{key.name}={text}")
        value = getattr(getattr(given, key.section) if key.section else given, key.leaf)
        assert value == default
        assert type(value) is type(default)
        if key.name in ("run_dir", "resume"):
            assert config.load(toml(config.to_toml(given))) == given


def test_optional_keys_default_to_none_so_that_leaving_them_out_is_exact():
    for key in config.keys().values():
        assert key.default is not dataclasses.MISSING, key.name
        if convert_text("none", key.hint) is None:
            assert key.default is None, key.name


# Types (BL-68)


@pytest.mark.parametrize(
    ("option", "number"),
    [
        ("--optimizer.learning_rate=1e-4", 0.0001),
        ("--optimizer.learning_rate=.5", 0.5),
        ("--optimizer.weight_decay=1e-1", 0.1),
        ("--optimizer.weight_decay=5", 5.0),
        ("--ep.sender_factor=1.25", 1.25),
        ("--train.steps=1e3", 1000),
        ("--train.steps=5", 5),
        ("--ep.rescale=true", True),
        ("--ep.rescale=false", False),
    ],
)
def test_command_line_values_become_the_declared_type(option, number):
    key = config.keys()[option.removeprefix("--").partition("=")[0]]
    value = getattr(getattr(parse(option), key.section), key.leaf)
    assert value == number
    assert type(value) is type(number)


def test_two_spellings_of_an_option_and_of_a_number_are_the_same():
    assert parse("--optimizer.learning_rate", "1e-4") == parse("--optimizer.learning_rate=0.0001")
    assert parse("--train.steps", "1e3") == parse("--train.steps=1000")


def test_text_is_taken_as_it_is():
    assert parse("--run_dir", "no").run_dir == "no"
    assert parse("--run_dir=1e4").run_dir == "1e4"
    assert parse("--run_dir=a=b").run_dir == "a=b"
    assert parse("--run_dir=--odd").run_dir == "--odd"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("train.steps=8.5", "train.steps = 8.5: expected an integer"),
        ("train.steps=1:30", "train.steps = '1:30': expected an integer"),
        ("train.steps=nan", "train.steps = nan: expected an integer"),
        ("train.steps=1e400", "train.steps = inf: expected an integer"),
        ("train.steps=true", "train.steps = 'true': expected an integer"),
        ("train.steps=0", "train.steps = 0: allowed is at least 1"),
        ("router.num_experts=8.5", "router.num_experts = 8.5: expected an integer"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate = -1.0: allowed is at least 0.0"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate = 'fast': expected a number"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate = nan: expected a number"),
        ("optimizer.learning_rate=", "optimizer.learning_rate = '': expected a number"),
        ("ep.sender_factor='1.25'", "ep.sender_factor = \"'1.25'\": expected a number"),
        ("ep.sender_factor=0", "ep.sender_factor = 0.0: allowed is above 0.0"),
        ("ep.rescale=yes", "ep.rescale = 'yes': expected true or false"),
        ("ep.rescale=1", "ep.rescale = '1': expected true or false"),
        ("model.remat=some", "model.remat = 'some': allowed is one of none, products, exchanges, full"),
    ],
)
def test_command_line_values_of_another_type_or_out_of_bounds_are_refused(option, message):
    assert refusal(parse, f"--{option}") == message


@pytest.mark.parametrize(
    ("section", "line", "parts"),
    [
        ("ep", 'sender_factor = "1.25"', ["ep.sender_factor = '1.25'", "a number"]),
        ("optimizer", 'learning_rate = "1e-4"', ["optimizer.learning_rate = '1e-4'", "a number"]),
        ("optimizer", "learning_rate = -1", ["optimizer.learning_rate = -1.0", "at least 0"]),
        ("optimizer", "learning_rate = inf", ["optimizer.learning_rate = inf", "a number"]),
        ("optimizer", "weight_decay = true", ["optimizer.weight_decay = True", "a number"]),
        ("router", "num_experts = 8.5", ["router.num_experts = 8.5", "an integer"]),
        ("router", "num_experts = true", ["router.num_experts = True", "an integer"]),
        ("ep", "rescale = 0", ["ep.rescale = 0", "true or false"]),
        ("ep", "rescale = no", ["line 2", "rescale = no", "true and false"]),
        ("ep", "transport = ragged", ["line 2", "transport = ragged", "quotes"]),
        ("train", "steps = 1:30", ["line 2", "steps = 1:30"]),
        ("train", "steps = [5]", ["train.steps = [5]", "an integer"]),
        ("train", "steps = {a = 5}", ["train.steps = {'a': 5}", "an integer"]),
        ("train", "steps = 01:30:00", ["train.steps = datetime.time(1, 30)", "an integer"]),
        ("data", "path = 5", ["data.path = 5", "text"]),
    ],
)
def test_file_values_of_another_type_are_refused(toml, section, line, parts):
    message = refusal(config.load, toml(f"[{section}]\n{line}\n"))
    assert all(part in message for part in parts), message


def test_file_numbers_convert_only_where_nothing_is_lost(toml):
    given = config.load(toml("[train]\nsteps = 1e3\n[optimizer]\nlearning_rate = 1e-4\nweight_decay = 1\n"))
    assert (given.train.steps, type(given.train.steps)) == (1000, int)
    assert given.optimizer.learning_rate == 0.0001
    assert (given.optimizer.weight_decay, type(given.optimizer.weight_decay)) == (1.0, float)
    assert convert(2**53 + 1, float) == 2**53 + 1  # stays an integer, which check refuses
    assert type(convert(2**53 + 1, float)) is int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lists:
    SECTION: ClassVar[str] = "lists"
    sizes: tuple[int, ...] = setting((1,), at_least=1, doc="sizes")
    names: tuple[str, ...] = setting((), doc="names")
    rate: float | None = setting(None, above=0.0, doc="rate")

    def __post_init__(self):
        check(self)


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("[1, 2]", tuple[int, ...], (1, 2)),
        ("1,2", tuple[int, ...], (1, 2)),
        ("3", tuple[int, ...], (3,)),
        ("3,", tuple[int, ...], (3,)),
        ("", tuple[int, ...], ()),
        ("[]", tuple[int, ...], ()),
        ("1, 2.5", tuple[float, ...], (1.0, 2.5)),
        ("a, b c", tuple[str, ...], ("a", "b c")),
        ('["a,b"]', tuple[str, ...], ("a,b",)),
        ("none", float | None, None),
        ("2", float | None, 2.0),
    ],
)
def test_lists_and_optional_values_from_the_command_line(text, hint, value):
    assert convert_text(text, hint) == value


@pytest.mark.parametrize(
    ("field", "text", "wanted"),
    [
        ("sizes", "1,x", "a list of integers"),
        ("sizes", "[1, 2", "a list of integers"),
        ("sizes", "[1]\nextra = 2", "a list of integers"),
        ("sizes", "1,0", "at least 1"),
        ("names", "[1]", "a list of text"),
        ("rate", "slow", "a number (or left out)"),
    ],
)
def test_bad_lists_and_optional_values_are_refused(field, text, wanted):
    hint = Lists.__annotations__[field]
    message = refusal(lambda: Lists(**{field: convert_text(text, hint)}))
    assert message.startswith(f"lists.{field} = ")
    assert wanted in message


# Files


def test_defaults_apply_without_a_config_and_are_a_legal_run():
    assert parse() == config.RunConfig()
    config.check_run(config.RunConfig())


def test_a_shipped_config_is_found_from_any_folder_by_path_or_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = parse("--config", str(ROOT / "configs" / "tiny.toml"))
    assert tiny.run_dir == "runs/tiny"
    for name in ("tiny", "tiny.toml", "configs/tiny.toml", "configs/tiny"):
        assert parse("--config", name) == tiny


def test_a_file_at_the_path_goes_before_the_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text("run_dir = 'mine'\n")
    assert parse("--config", "tiny.toml").run_dir == "mine"
    assert parse("--config", "tiny").run_dir == "runs/tiny"


def test_a_leading_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.toml").write_text("run_dir = '~/runs/mine'\n")
    given = parse("--config=~/mine.toml")
    assert given.run_dir == "~/runs/mine"
    assert given.folder == tmp_path / "runs" / "mine"


def test_overrides_come_after_the_file():
    assert parse("--train.steps", "5", "--config", "tiny").train.steps == 5


def test_every_shipped_config_is_legal():
    names = list(config_files.shipped_configs())
    assert "tiny" in names
    for name in names:
        given = config.load(name)
        fixed = math.prod(size for size in given.mesh.shape if size != -1)
        for size in (1, 2):  # what an axis of -1 may come to
            config.check_run(config.placed(given, fixed * size if -1 in given.mesh.shape else None))


def test_tiny_has_the_promised_sizes_and_names_only_what_differs_from_the_defaults():
    tiny = config.load("tiny")
    assert (tiny.mesh.replica, tiny.mesh.fsdp, tiny.mesh.ep) == (1, 2, 4)
    assert (tiny.model.num_layers, tiny.model.model_dim, tiny.model.latent_dim) == (4, 128, 64)
    assert (tiny.router.num_experts, tiny.router.experts_per_token) == (16, 2)
    assert (tiny.data.sequence_length, tiny.train.sequences_per_step, tiny.train.steps) == (256, 16, 300)
    table = config_files.read_toml("tiny")
    for section, fields in table.items():
        for field in fields if isinstance(fields, dict) else ():
            key = config.keys()[f"{section}.{field}"]
            assert fields[field] != key.default, key.name


def test_files_that_cannot_be_read_are_refused(tmp_path, toml):
    message = refusal(parse, "--config", "nowhere/tiny.tml")
    assert "'nowhere/tiny.tml': no such file" in message
    assert "tiny" in message.split("shipped name:")[1]
    assert "is a folder" in refusal(config.load, str(tmp_path))
    assert "no such file" in refusal(config.load, "~nobody-of-that-name/x.toml")
    (tmp_path / "latin.toml").write_bytes(b"run_dir = '\xe9'\n")
    assert "UTF-8" in refusal(config.load, str(tmp_path / "latin.toml"))
    assert "line 1, 'run_dir = \"a': " in refusal(config.load, toml('run_dir = "a\n'))
    assert "given.toml" in refusal(config.load, toml("[train]\nsteps = " + "1" * 5000))


@pytest.mark.parametrize(
    "folder",
    [
        "a b",
        "q\"uo'te",
        "back\\slash",
        "tab\tnew\nline\x7f\x01",
        "Zürich \u6771 \U0001f9ea",
        "# no comment",
        "=",
        "[x]",
    ],
)
def test_text_round_trips_exactly(toml, folder):
    given = parse(f"--run_dir={folder}")
    assert given.run_dir == folder
    assert config.load(toml(config.to_toml(given))) == given


@pytest.mark.parametrize("number", [1e-5, 0.1, 1 / 3, 1e22, 5e-324, 1.7976931348623157e308, 3.0])
def test_floats_round_trip_exactly(toml, number):
    given = parse(f"--model.rope_theta={number!r}")
    assert given.model.rope_theta == number
    assert config.load(toml(config.to_toml(given))) == given


def test_the_resolved_config_in_a_run_folder_is_reloadable(tmp_path):
    folder = tmp_path / "deep" / "run"
    given = parse(
        "--config=tiny",
        f"--run_dir={folder}",
        "--ep.rescale=true",
        "--optimizer.learning_rate=1e-4",
        "--optimizer.adam_learning_rate=3e-4",
    )
    assert given.folder == folder
    path = config.write_config(given)
    assert [file.name for file in folder.iterdir()] == ["config.toml"]
    assert parse("--config", str(path)) == given
    assert "learning_rate = 0.0001" in path.read_text(encoding="utf-8")
    assert config.write_config(given) == path


# Rules that span sections (BL-44)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (with_mesh(ep=4, router={"num_experts": 6}), ["router.num_experts = 6", "4 (mesh.ep)", "4 and 8"]),
        (with_mesh(ep=8, router={"num_experts": 4}), ["router.num_experts = 4", "8 (mesh.ep)"]),
        (with_mesh(fsdp=8, train={"sequences_per_step": 12}), ["train.sequences_per_step = 12", "8 (", "8 and 16"]),
        (
            with_mesh(replica=2, ep=2, train={"sequences_per_step": 36, "accumulation": 2}),
            ["train.sequences_per_step = 36", "multiple of 8", "train.accumulation = 2 times 4 devices", "32 and 40"],
        ),
        (with_mesh(fsdp=2, ep=4, train={"eval_sequences": 12}), ["train.eval_sequences = 12", "multiple of 8"]),
        (with_mesh(model={"window": 256, "global_every": 2}), ["model.window = 256", "data.sequence_length = 256"]),
        (with_mesh(model={"window": 300, "global_every": 2}), ["model.window = 300", "data.sequence_length = 256"]),
        (with_mesh(fsdp=8, model={"model_dim": 132}), ["model.model_dim = 132", "multiple of 8", "128 and 136"]),
        (
            with_mesh(fsdp=2, ep=4, model={"num_heads": 2, "head_dim": 30}),
            ["model.num_heads x model.head_dim = 60", "multiple of 8", "56 and 64"],
        ),
        (with_mesh(ep=8, model={"latent_dim": 60}), ["model.latent_dim = 60", "multiple of 8"]),
        (with_mesh(ep=8, model={"shared_hidden_dim": 100}), ["model.shared_hidden_dim = 100", "multiple of 8"]),
        (with_mesh(fsdp=8, model={"expert_hidden_dim": 100}), ["model.expert_hidden_dim = 100", "multiple of 8"]),
        (with_mesh(ep=-1), ["mesh.ep = -1", "resolve"]),
        (with_mesh(train={"accumulation": 0, "sequences_per_device": 1}), ["train.accumulation = 0", "resolve"]),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused_with_both_numbers(given, parts):
    message = refusal(config.check_run, given)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "given",
    [
        with_mesh(fsdp=2, ep=4),
        with_mesh(replica=2, fsdp=2, ep=2),
        with_mesh(model={"window": 255, "global_every": 2}),
        with_mesh(ep=8, model={"expert_hidden_dim": 100}),  # split over fsdp only
        with_mesh(ep=8, model={"num_shared_experts": 0, "shared_hidden_dim": 100}),  # no such weight
        with_mesh(fsdp=4, train={"sequences_per_step": 32, "accumulation": 8}),
    ],
)
def test_sizes_that_fit_together_are_accepted(given):
    config.check_run(given)


def test_an_axis_of_minus_one_is_resolved_once_and_echoed_as_a_number(toml):
    given = parse("--mesh.fsdp=2", "--mesh.ep=-1")
    resolved = config.placed(given, 8)
    config.check_run(resolved)
    assert "\nfsdp = 2 " in config.to_toml(resolved)
    assert "\nep = 4 " in config.to_toml(resolved)
    assert config.load(toml(config.to_toml(resolved))) == resolved


@pytest.mark.parametrize(
    ("rows", "at_a_time", "devices", "emulated", "parts"),
    [
        (256, 16, 1, 0, 16),
        (256, 16, 2, 0, 8),
        (256, 16, 64, 0, 1),  # fewer are there than a device may have
        (96, 5, 8, 0, 3),  # 12 rows a device in parts of 4: 5 divides nothing
        (42, 4, 2, 0, 7),  # 21 a device
        (64, 8, 2, 16, 4),  # as 16 shards: 4 rows each
        (64, 1, 2, 16, 4),  # a row for each of 16 shards is 8 a device, and less cannot be
        (3, 1, 8, 0, 1),  # divides over nothing: refused by check_run
    ],
)
def test_accumulation_follows_from_the_rows_of_a_device(toml, rows, at_a_time, devices, emulated, parts):
    train = {"sequences_per_step": rows, "accumulation": 0, "sequences_per_device": at_a_time}
    given = with_mesh(ep=-1, train=train)
    given = dataclasses.replace(given, ep=dataclasses.replace(given.ep, emulated_shards=emulated))
    found = config.placed(given, devices)
    assert found.train.accumulation == parts
    assert config.placed(found, devices) == found == config.load(toml(config.to_toml(found)))
    rows_at_a_time = rows / parts / devices
    assert rows_at_a_time <= at_a_time or rows / parts == emulated or rows < devices


def test_accumulation_0_needs_the_rows_of_a_device():
    message = refusal(lambda: parse("--train.accumulation=0"))
    assert message == "train.accumulation = 0: needs train.sequences_per_device of at least 1"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--mesh.ep=3"], ["3", "8"]),
        (["--mesh.fsdp=3", "--mesh.ep=-1"], ["3", "8"]),
        (["--mesh.ep=4"], ["4", "8"]),
        (["--mesh.ep=4", "--mesh.fsdp=2", "--router.num_experts=6"], ["num_experts = 6", "4 (mesh.ep)"]),
        (["--mesh.fsdp=8", "--train.sequences_per_step=12"], ["sequences_per_step = 12", "multiple of 8"]),
    ],
)
def test_a_run_that_does_not_fit_8_devices_is_refused_with_both_numbers(argv, parts):
    def start():
        given = parse(*argv)
        config.check_run(config.placed(given, 8))

    message = refusal(start)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--router.experts_per_token=17"], ["= 17", "16"]),
        (["--model.num_kv_heads=3"], ["= 3", "4"]),
        (["--mesh.ep=-1", "--mesh.fsdp=-1"], ["-1"]),
        (["--mesh.ep=0"], ["mesh.ep = 0"]),
    ],
)
def test_rules_inside_a_section_are_refused_when_parsed(argv, parts):
    message = refusal(parse, *argv)
    assert all(part in message for part in parts), message
