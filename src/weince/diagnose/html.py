"""What all pages share: templates that escape their input, and one head with the style sheet."""

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined


def templates(package: str) -> Environment:
    """The templates in the folder ``templates`` of a package; an undefined name in a template is an error."""
    return Environment(
        loader=ChoiceLoader([PackageLoader(name, "templates") for name in (package, __package__)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
