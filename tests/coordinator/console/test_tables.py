"""Tables show what they are given, and obey none of it."""

from rich.console import Console

from raycloak.coordinator.console.tables import fields_table


def test_a_name_in_a_title_or_a_field_is_shown_as_it_is_and_is_no_markup(capsys):
    name = "[red]run[/red]"
    Console(width=80, force_terminal=False).print(fields_table(name, [("a label of some length", name)]))
    assert capsys.readouterr().out.count(name) == 2
