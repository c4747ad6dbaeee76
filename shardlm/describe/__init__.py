"""What a model will see of its text: the logic of `shardlm data describe`."""

from pathlib import Path

from shardlm.config import Config, ConfigError
from shardlm.data import load_data
from shardlm.files import replace_text
from shardlm.observe import Progress
from shardlm.options import DescribeOptions


def describe_data(options: DescribeOptions, config: Config) -> None:
    """Print the page, and write it as HTML if that is asked for. Text that is in no store is
    tokenized first, as for training.

    Raises:
      ConfigError: as for training, or there is no place for the HTML file.
      OSError: the HTML file cannot be written; one that is there stays as it is.
    """
    html = None if options.html is None else Path(options.html)
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        what = "is a directory" if html.is_dir() else f"cannot be: {html.parent} is no directory"
        raise ConfigError(f"html is {html}, which {what}: name a file in a directory that is there")
    data = load_data(config, display=Progress)
    # Here, since they load jax and rich: what can go wrong above is told at once.
    from shardlm.data.describe import describe
    from shardlm.data.shown import visible
    from shardlm.describe import page, terminal
    from shardlm.describe.sections import sections, without_border
    from shardlm.describe.ways import dealt_ways

    ways, why = dealt_ways(config, data.tokenizer.vocab_size)
    found = describe(data, config, ways)
    title = visible(f"What {options.configuration} reads")
    parts, under = sections(found, why), without_border(found)
    terminal.show(title, parts, found.rows, under)
    if html is not None:
        replace_text(html, page.render(title, parts, found.rows, under))
        print(f"the same with whole rows: {html}")
