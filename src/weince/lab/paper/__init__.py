"""The paper's own figures: nothing here decides a verdict. ``weince diagnose --paper`` adds them to its page."""
